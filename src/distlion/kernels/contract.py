"""The ops of the arithmetic: signatures, shapes, dtypes, and bitwise definitions.

Notation:
    g, m, x   gradient, momentum (``exp_avg``) and parameter of one element, widened to float32
    fl(...)   one rounding to float32, to nearest even
    constants beta1, 1 - beta1, beta2, 1 - beta2, d = 1 - lr * weight_decay and a = lr / n are
              computed in double and rounded once to float32

    g  = fl(gradient * grad_scale), left out where grad_scale is 1
    c  = fl(fl(beta1 * m) + fl((1 - beta1) * g))                       the direction
    c  = c where c > 0 and g > 0, or c < 0 and g < 0; else +0          if cautious
    m' = fl(fl(beta2 * m) + fl((1 - beta2) * g))                       the new momentum
    x' = fl(fl(d * x) - fl(a * S))                                     the new parameter

    One final rounding takes m' and x' to their storage dtype. S is the integer of the reply; n = 1,
    except for a reply of counts: n = workers present. No fused multiply-add, no division inside an
    op. Given equal inputs, every backend returns equal bits, whatever its instruction set and
    number of threads; only the bits of a NaN are not fixed. The check that c is finite comes before
    the mask of a cautious parameter, which would hide a NaN.

Dtypes:
    parameter and gradient float32, bfloat16 or float16; exp_avg float32 or bfloat16.

Coins:
    Element i of a slot has number k = 64 * first_word + first_bit + i among the coins, wherever its
    vote lies: a tie or a zero takes bit k % 64 of word k // 64. So a parameter that is cut anywhere
    keeps the coins of the whole one.

Packed tensors:
    (blocks, planes, 8) int64 on the device of the parameters, contiguous; ``distlion.layout`` says
    which bit is whose. Spare bits, and the bits of parameters that a worker abstains for, are 0.

Devices:
    All tensors of a call are on one device, and so are its results: packed tensors, flags, sums,
    digests. Only ``present`` is on the CPU, or a sequence of Python numbers; and frames, as the
    network reads host memory. If no
    tensor is given, results have no elements and are on the CPU. An op puts its work on the
    device's current stream and returns; it never waits for the device. A caller that needs results
    on the host reads them there, as many as possible at once.

``reference.py`` defines the correct result; ``dispatch.py`` chooses a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.counting import CountingKernels
from distlion.layout import Slot

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXP_AVG_DTYPES = (torch.float32, torch.bfloat16)
SCALE_BLOCK_ELEMENTS = 4096
CHECKSUM_BYTES = 4
FLOAT32_MAX = torch.finfo(torch.float32).max

# (seed, step, rank, domain of ``Coins``) -> words 0, 1 and 2**33 of the coin; computed with Python
# integers from the equations of coin.py, and checked against a published value: splitmix64 seeded
# with 0 first gives 0xE220A8397B1DCDAF.
SPLITMIX64_FIRST = 0xE220A8397B1DCDAF
COIN_VECTORS: dict[tuple[int, int, int, str], tuple[int, int, int]] = {
    (0, 0, 0, "tie"): (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0xBECADFBDE9F35965),
    (0, 1, 0, "tie"): (0x1DDF57C684E23250, 0x918761955E469A0B, 0x41352042160CA69A),
    (0, 7, 0, "rounding"): (0x64BF6909D6AB6A2A, 0xFF277A88778DFBFD, 0x2CEB51AA1B67ED8C),
    (1234567, 10, 3, "zero"): (0xFF3B76BA34571444, 0x99F18A07EC515D26, 0x12ED06D06B867CE2),
    (1234567, 11, 3, "zero"): (0x00C48945CBA8EBBB, 0x660E75F813AEA2D9, 0xED12F92F9479831D),
    (2**64 - 1, 2**40, 1023, "zero"): (0x71AD5BD2E211A276, 0x0EC420E6FA114147, 0xDA17181C2B4FBC32),
}


class VoteFormat(Enum):
    """Meanings of the planes of a vote."""

    LEVEL = "level"
    """Plane 0 is the sign, the others, lowest first, the bits of a: sign * (2 a + 1)."""
    TERNARY = "ternary"
    """Plane 0 is the sign, plane 1 whether it is not 0."""
    PAIR = "pair"
    """Plane 0 is the sign of the direction, plane 1 that of the gradient: two votes."""
    DIRECTION = "direction"
    """The bits of a float. Sums of floats depend on their order, so there are no partial sums."""
    STEP = "step"
    """Plane 0 is the sign; plane 1, if any, selects one of the parameter's two scales."""

    @property
    def has_partial_sums(self) -> bool:
        """True if a vote is one integer: a sum of them has no order, and is one number."""
        return self in (VoteFormat.LEVEL, VoteFormat.TERNARY)


class ReplyFormat(Enum):
    """Formats in which a reply encodes the integer S of an element."""

    SIGN = "sign"
    """One plane: S = +1 where the bit is 1, else -1."""
    TERNARY = "ternary"
    """Sign plane, non-zero plane: S = 0 where the second bit is 0."""
    COUNT = "count"
    """Binary number of the +1 votes, lowest bit first: S = 2 * count - n, n present; a = lr / n."""


class Coefficients(NamedTuple):
    """The hyperparameters of one parameter in this step, in double.

    The C++ core reads the fields of this class and the next one by position.

    Attributes:
        beta1, beta2: Weights of the momentum in the direction and in the new momentum, in [0, 1).
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        grad_scale: Factor for the raw gradient: 1, or 1 / the scale of a GradScaler.
        cautious: Mask elements whose direction and gradient differ in sign (arXiv:2411.16085).
        orthogonalize: Whether the direction, as a matrix, is orthogonalized before it is encoded
            or moves a single worker's parameter. No op reads it; see ``orthogonal.py``.
    """

    beta1: float
    beta2: float
    lr: float
    weight_decay: float
    grad_scale: float = 1.0
    cautious: bool = False
    orthogonalize: bool = False


class FrameFormat(NamedTuple):
    """Places of what a frame holds before its payload, in bytes from its start.

    Attributes:
        checksum_at: Place of the checksum.
        presence_at: Place of the votes for each parameter.
        n_params: Number of parameters.
        has_counts: Whether there are 16 bits for each of them, little-endian, rather than one.
    """

    checksum_at: int
    presence_at: int
    n_params: int
    has_counts: bool


class Segment(NamedTuple):
    """One parameter in the form for the ops: three tensors, its place and its hyperparameters.

    Attributes:
        slot: Its place in the bucket and among the coins.
        param: n elements, contiguous, of any shape: element j is the j-th in memory. Flat tensors
            would cost three views for each parameter and step.
        grad: As ``param``, and of its dtype; None where this worker abstains.
        exp_avg: As ``param``.
        coefficients: Its hyperparameters.
    """

    slot: Slot
    param: Tensor
    grad: Tensor | None
    exp_avg: Tensor
    coefficients: Coefficients


class Kernels(CountingKernels, Protocol):
    """The ops of a backend. Encoding only reads its segments; ``out`` is overwritten completely.

    The ops that count votes are in ``counting.py``.
    """

    def gather(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Read segments once for several ops, such as ``encode`` and ``commit``.

        Returns:
            The same segments; valid as long as their tensors keep their addresses.
        """
        ...

    def encode_signs(self, segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
        """Encode directions as signs.

        Equation:
            bit = 1 if c > 0, 0 if c < 0; c = 0 takes the zero coin of its element

        Args:
            segments: Segments of one bucket, in order.
            zero: The worker's coin for directions that are exactly 0.
            out: (blocks, 1, 8) int64.

        Returns:
            (n_segments,) bool on the device of ``out``: whether g, c and the stored m' are finite
            everywhere; True where the segment abstains. One that is not finite is written as zeros.
        """
        ...

    def encode_ternary(self, segments: Sequence[Segment], *, out: Tensor) -> Tensor:
        """Encode directions as -1, 0, 1: a sign plane (1 where c > 0) and a non-zero plane.

        Args:
            segments: Segments of one bucket, in order.
            out: (blocks, 2, 8) int64.

        Returns:
            As ``encode_signs``.
        """
        ...

    def encode_pairs(self, segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
        """Encode the signs of direction and gradient: a plane of c, and a plane of g.

        Equation:
            bit of c  1 if c > 0, 0 if c < 0; c = 0 takes the zero coin of its element
            bit of g  likewise; g = 0 takes another coin, whose key is mix(key of the zero coin)

        Args:
            segments: Segments of one bucket, in order.
            zero: The worker's coin for what is exactly 0.
            out: (blocks, 2, 8) int64.

        Returns:
            As ``encode_signs``.
        """
        ...

    def encode_levels(
        self,
        segments: Sequence[Segment],
        zero: Coin,
        *,
        norm: Literal["l1", "linf"],
        step: float,
        out: Tensor,
    ) -> Tensor:
        """Encode directions as odd levels -(2**p - 1), ..., -1, 1, ..., 2**p - 1.

        Equation:
            s = mean |c| ("l1") or max |c| ("linf") over 4,096 elements, counted from the
                parameter's start
            r = min(fl(1 / (s * step)), FLT_MAX), the division in double; 0 where s = 0
            a = min(floor(fl(|c| * r)), 2**(p - 1) - 1), clamped as float
            vote = sign(c) * (2 a + 1); the sign of c = 0 is the zero coin

            The mean widens |c| to double, pads with zeros, adds x[j] + x[j + h] for h = 2048, 1024,
            ..., 1, divides by the true count and is rounded to float32 once.

        Args:
            segments: Segments of one bucket, in order.
            zero: The worker's coin for directions that are exactly 0.
            norm: Norm of s.
            step: Width of a level in units of s, > 0.
            out: (blocks, p, 8) int64: the sign plane, then a from its lowest bit.

        Returns:
            As ``encode_signs``.
        """
        ...

    def encode_directions(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        """Write the directions themselves, rounded to ``dtype``.

        Args:
            segments: Segments of one bucket, in order.
            dtype: float32 or bfloat16.
            out: (blocks, 32 or 16, 8) int64, whose bytes are the 512 values of each block in order.

        Returns:
            As ``encode_signs``, the rounded c counting as c.
        """
        ...

    def encode_rests(
        self,
        segments: Sequence[Segment],
        estimates: Sequence[Tensor] | None,
        zero: Coin,
        *,
        out: Tensor,
        scales: Tensor,
        are_residuals: bool = False,
    ) -> Tensor:
        """Encode the rests of directions, which their estimates lack.

        Equation:
            d = fl(c - h), or fl(c + h) for residuals
            the sign bit is 1 if d > 0, 0 if d < 0, and the zero coin's if d = 0
            one bit   scale: a = mean |d| over the segment
            two bits  the second bit is 1 if |d| >= a; scales: the mean |d| of the elements whose
                      second bit is 0, and of those where it is 1; 0 for none

            Means are sums in double by halving: x[j] + x[j + 2048], then + x[j + 1024] and so on in
            each 4,096 elements, padded with zeros, and again with the sums; divided, and rounded
            to float32 once.

        Args:
            segments: Segments of one bucket, in order.
            estimates: For each segment h, n elements float32, contiguous, of any shape. Read only.
                None for 0.
            zero: The worker's coin for rests that are exactly 0.
            out: (blocks, 1 or 2, 8) int64.
            scales: (n_segments, 1 or 2) float32, contiguous. Overwritten.
            are_residuals: Whether h is what earlier votes left out, which adds to the direction.

        Returns:
            As ``encode_signs``, and False where mean |d| is not finite; there all is 0.
        """
        ...

    def encode_lots(
        self,
        segments: Sequence[Segment],
        lot: Coin,
        *,
        out: Tensor,
        scales: Tensor,
        reach: Sequence[float] = (),
        spread: float | None = None,
    ) -> Tensor:
        """Encode directions as stochastic signs.

        Equation:
            b = reach of the segment; without any, fl(spread * mean |c|), or max |c|
            r = min(fl(32768 / b), FLT_MAX), the division in double; 0 where b = 0
            the bit is 1 if lot < 32768 + floor(fl(c * r)), with a lot in [0, 65536) for each
            element; the right side is at least 0 and at most 65536: beyond b the bit is certain
            scale: mean |c|, as ``encode_rests``

        Args:
            segments: Segments of one bucket, in order.
            lot: The worker's coin. Element k among the coins takes 16 bits of word k // 4, those
                from bit 16 (k % 4) on.
            out: (blocks, 1, 8) int64.
            scales: (n_segments, 1) float32, contiguous. Overwritten.
            reach: For each segment b >= 0, rounded to float32; empty where it depends on the
                segment.
            spread: b in units of the mean |c|, rounded to float32.

        Returns:
            As ``encode_signs``.
        """
        ...

    def move_residuals(
        self,
        segments: Sequence[Segment],
        residuals: Sequence[Tensor],
        votes: Tensor,
        scales: Tensor,
        finite: Tensor,
    ) -> None:
        """Move what a worker's votes left out, in place, by its vote on directions.

        Equation:
            e' = fl(c - fl(q - e)), q = +-scale

        Args:
            segments: The segments that were encoded, of one bucket and in order. Those without a
                gradient keep e.
            residuals: For each segment e, as the estimates of ``encode_rests``; written.
            votes: (blocks, 1 or 2, 8) int64, as ``encode_rests`` wrote it.
            scales: (n_segments, 1 or 2) float32, likewise.
            finite: (n_segments,) bool, as it returned it; where it is False, e stays.
        """
        ...

    def commit(
        self,
        segments: Sequence[Segment],
        present: Sequence[int],
        reply: Tensor,
        *,
        reply_format: ReplyFormat,
        rounding: Coin | None,
    ) -> None:
        """Apply a reply and update the momentum: write x' and m'.

        Args:
            segments: Segments of one bucket, in order; ``param`` and ``exp_avg`` are written.
            present: For each segment, the number of votes (COUNT), or whether there was any. If it
                is 0, parameter and momentum do not change; if the segment has no gradient, the
                momentum does not change.
            reply: (blocks, planes, 8) int64 of the whole bucket.
            reply_format: The format in which it encodes S.
            rounding: Coin for bfloat16 parameters; None rounds to nearest even. Element j takes 16
                bits of word k // 4, those from bit 16 (k % 4) on, where k is its number among the
                coins; they are added below the kept mantissa, then truncated.
        """
        ...

    def update_momentum(self, segments: Sequence[Segment], present: Sequence[int]) -> None:
        """Write m' and leave the parameter unchanged; arguments as for ``commit``."""
        ...

    def step_alone(self, segments: Sequence[Segment], *, rounding: Coin | None) -> None:
        """Do a step of plain Lion: S = sign(c), 0 where c = 0.

        Segments without a gradient do not change.
        """
        ...

    def add_outer_momentum(
        self,
        params: Sequence[Tensor],
        starts: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        momentum: float,
        nesterov: bool,
        lr: float,
    ) -> None:
        """Move parameters from where a vote began, by a momentum of what votes did.

        Equation:
            u = fl(s - x);  b' = fl(fl(momentum * b) + u)
            x' = fl(s - fl(lr * v)), v = fl(fl(momentum * b') + u) with ``nesterov``, else b'

        Args:
            params: For each parameter x, after the vote; n elements float32, contiguous; written.
            starts: s, before the vote; as ``params``.
            buffers: b, as ``params``; written.
            momentum: Weight of the old momentum, rounded to float32.
            nesterov: Whether the momentum looks ahead.
            lr: Rate, rounded to float32.
        """
        ...

    def check_finite(self, segments: Sequence[Segment]) -> Tensor:
        """Return the flags of the encoders, (n_segments,) bool, without encoding."""
        ...

    def digests(self, tensors: Sequence[Tensor]) -> Tensor:
        """Digest the bits of each tensor.

        Equation:
            mix(n + sum over j of mix(u_j + (j + 1) * 0x9E3779B97F4A7C15)) modulo 2^64, u_j the bits
            of element j of n as an unsigned integer

        Args:
            tensors: k contiguous tensors of any shape and of any dtype of 1, 2 or 4 bytes.

        Returns:
            (k,) int64 on the device of the tensors.
        """
        ...

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum the squares of a contiguous tensor, in double, by blocks of 4,096 elements.

        Equation:
            s_b = sum of x_j^2 over block b, x_j widened to double, where a square is exact; padded
            with zeros and added as x[j] + x[j + h] for h = 2048, 1024, ..., 1

        Args:
            tensor: n elements, float32, bfloat16 or float16, of any shape. Blocks are counted from
                its start in memory.

        Returns:
            (ceil(n / 4096),) float64 on the tensor's device; infinities and NaN show in the sums of
            their blocks.
        """
        ...

    def write_frames(
        self, out: Tensor, front: bytes, payloads: Tensor, *, checksum_at: int
    ) -> None:
        """Write frames, which differ in their payloads: front, then payload.

        Equation:
            checksum = CRC-32 (IEEE 802.3, as zlib) of all other bytes of the frame, little-endian

        Args:
            out: (k, len(front) + n) uint8 on the CPU, each row contiguous. Overwritten.
            front: All before the payload, with 4 bytes to spare for the checksum.
            payloads: (k, n) uint8 on the CPU, each row contiguous.
            checksum_at: Place of the checksum in ``front``.
        """
        ...

    def read_frames(
        self, rows: Tensor, heads: bytes, mask: bytes, expected: FrameFormat
    ) -> tuple[bool, Tensor, Tensor]:
        """Check frames, and read the votes that they say to hold.

        Args:
            rows: (k, n) uint8 on the CPU, each row contiguous.
            heads: For each row the expected first bytes, as many as ``mask`` has.
            mask: The bits of the heads that must be as expected.
            expected: Where the rest is.

        Returns:
            Whether all frames are intact, with heads as expected; for each frame whether its
            checksum is right, (k,) bool; and the number of votes for each parameter,
            (k, n_params) int64, without meaning in a frame that is not intact. On the CPU.
        """
        ...
