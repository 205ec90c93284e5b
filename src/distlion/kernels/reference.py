"""Every op in plain torch: its documentation, and its correct result.

Backends override ops, and return equal bits. ``contract.py`` has the notation and the rules for all
ops; those that count votes are in ``counting.py``.

Notation of votes with scales and error feedback:
    h   estimate of an element: what the worker's votes have said of c so far, float32
    q   what a vote says of the rest, c - h; afterwards the estimate is fl(h + q)
    e   residual: what votes have left out of c so far, float32, in place of -h

Every sum of many elements is a tree of fixed shape, in double, and all else is done element by
element. So all backends and devices return equal bits here too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import (
    CHECKSUM_BYTES,
    FLOAT32_MAX,
    FLOAT_PLANES,
    Coefficients,
    FrameFormat,
    ReplyFormat,
    Segment,
)
from distlion.kernels.counting import CountingKernels
from distlion.kernels.words import (
    CHUNK_ELEMENTS,
    LOTS,
    coin_bits,
    cut_blocks,
    digest_bits,
    draw_lots,
    element_range,
    interleave,
    mean_by_halving,
    pack,
    read_steps,
    split_planes,
    sum_by_halving,
    tree_mean,
    unpack,
    word_range,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Slot


class Kernels(CountingKernels):
    """The ops. Encoding only reads its segments; ``out`` is overwritten completely."""

    def gather(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Read segments once for several ops, such as ``encode`` and ``commit``.

        Returns:
            The same segments; valid as long as their tensors keep their addresses.
        """
        return tuple(segments)

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
        return _encode(segments, out, lambda c, segment: [_sign_words(c, segment.slot, zero)])

    def encode_ternary(self, segments: Sequence[Segment], *, out: Tensor) -> Tensor:
        """Encode directions as -1, 0, 1: a sign plane (1 where c > 0) and a non-zero plane.

        Args:
            segments: Segments of one bucket, in order.
            out: (blocks, 2, 8) int64.

        Returns:
            As ``encode_signs``.
        """
        return _encode(segments, out, lambda c, _: [pack(c > 0), pack(c != 0)])

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

        def planes_of(c: Tensor, segment: Segment) -> list[Tensor]:
            assert segment.grad is not None
            g = _widened_grad(segment.grad, segment.coefficients)
            return [_sign_words(c, segment.slot, zero), _sign_words(g, segment.slot, zero.second)]

        return _encode(segments, out, planes_of)

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
        n_magnitude_bits = out.shape[1] - 1

        def planes_of(c: Tensor, segment: Segment) -> list[Tensor]:
            levels = _levels(c, norm, step, highest=2**n_magnitude_bits - 1)
            return [_sign_words(c, segment.slot, zero)] + [
                pack((levels >> bit) & 1) for bit in range(n_magnitude_bits)
            ]

        return _encode(segments, out, planes_of)

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
        values = out.zero_().view(-1).view(dtype)
        finite = torch.ones(len(segments), dtype=torch.bool, device=out.device)
        for index, segment in enumerate(segments):
            if segment.grad is None:
                continue
            c, finite[index] = _checked_direction(segment, segment.grad, dtype)
            start = segment.slot.bucket_word * WORD_ELEMENTS
            values[start : start + c.numel()] = c.masked_fill(~finite[index], 0)
        return finite

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
        n_planes = out.shape[1]
        values, finite = _read_directions(self, segments, out)
        planes = out.new_zeros(n_planes, out.shape[0] * BLOCK_WORDS)
        scales.zero_()
        for index, segment in enumerate(segments):
            slot = segment.slot
            if segment.grad is None or not slot.n_elements:
                continue
            rest = values[element_range(slot)]
            if estimates is not None:
                kept = estimates[index].view(-1)
                rest = rest + kept if are_residuals else rest - kept
            sizes = rest.abs()
            mean = tree_mean(sizes, slot.n_elements)
            words = [_sign_words(rest, slot, zero)]
            found = [mean]
            if n_planes > 1:
                is_large = sizes >= mean
                words.append(pack(is_large))
                found = [_mean_of(sizes, ~is_large), _mean_of(sizes, is_large)]
            # Not a branch, which would wait for the device. Estimates may be so far off that c - h
            # exceeds the range of a float, even for a finite c.
            is_finite = finite[index] & mean.isfinite()
            finite[index] = is_finite
            for plane, row in enumerate(words):
                planes[plane, word_range(slot)] = row.masked_fill(~is_finite, 0)
            scales[index] = torch.stack(found).masked_fill(~is_finite, 0.0)
        interleave(planes, out)
        return finite

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
        values, finite = _read_directions(self, segments, out)
        planes = out.new_zeros(1, out.shape[0] * BLOCK_WORDS)
        scales.zero_()
        for index, segment in enumerate(segments):
            slot = segment.slot
            if segment.grad is None or not slot.n_elements:
                continue
            directions = values[element_range(slot)]
            sizes = directions.abs()
            mean, most = tree_mean(sizes, slot.n_elements), sizes.max()
            if reach:
                most = torch.full_like(mean, reach[index])
            elif spread is not None:
                most = mean * spread
            ratio = ((LOTS // 2) / most.double()).clamp(max=FLOAT32_MAX).float()
            ratio = ratio.masked_fill(most == 0, 0.0)
            level = (directions * ratio).floor().clamp(-(LOTS // 2), LOTS // 2).int() + LOTS // 2
            bits = pack(draw_lots(lot, slot, device=out.device) < level)
            planes[0, word_range(slot)] = bits.masked_fill(~finite[index], 0)
            scales[index, 0] = mean.masked_fill(~finite[index], 0.0)
        interleave(planes, out)
        return finite

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
        values, _ = _read_directions(self, segments, votes)
        planes = split_planes(votes)
        for index, segment in enumerate(segments):
            slot = segment.slot
            if segment.grad is None or not slot.n_elements:
                continue
            residual = residuals[index].view(-1)
            steps = read_steps(planes[:, word_range(slot)], slot.n_elements, scales[index])
            after = values[element_range(slot)] - (steps - residual)
            residual.copy_(torch.where(finite[index], after, residual))

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
        planes = split_planes(reply)
        for index, segment in enumerate(segments):
            if n := present[index]:
                s = _replied(planes, segment.slot, n, reply_format)
                _move(segment, s, n if reply_format is ReplyFormat.COUNT else 1, rounding)
        self.update_momentum(segments, present)

    def update_momentum(self, segments: Sequence[Segment], present: Sequence[int]) -> None:
        """Write m' and leave the parameter unchanged; arguments as for ``commit``."""
        for index, segment in enumerate(segments):
            if present[index] and segment.grad is not None:
                segment.exp_avg.view(-1).copy_(_new_momentum(segment, segment.grad))

    def step_alone(self, segments: Sequence[Segment], *, rounding: Coin | None) -> None:
        """Do a step of plain Lion: S = sign(c), 0 where c = 0.

        Segments without a gradient do not change.
        """
        for segment in segments:
            if segment.grad is not None:
                c = _mask(_direction(segment, segment.grad), segment, segment.grad)
                _move(segment, c.sign(), 1, rounding)
                segment.exp_avg.view(-1).copy_(_new_momentum(segment, segment.grad))

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
        for param, start, buffer in zip(params, starts, buffers, strict=True):
            moved = start - param
            # Separate products and sums: fused ones would round differently on another device.
            buffer.mul_(momentum).add_(moved)
            move = buffer * momentum + moved if nesterov else buffer
            param.copy_(start - move * lr)

    def check_finite(self, segments: Sequence[Segment]) -> Tensor:
        """Return the flags of the encoders, (n_segments,) bool, without encoding."""
        device = segments[0].param.device if segments else None
        finite = torch.ones(len(segments), dtype=torch.bool, device=device)
        for index, segment in enumerate(segments):
            if segment.grad is not None:
                _, finite[index] = _checked_direction(segment, segment.grad)
        return finite

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
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return torch.stack([digest_bits(tensor) for tensor in tensors])

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
        chunks = torch.split(tensor.view(-1), CHUNK_ELEMENTS)
        return torch.cat([sum_by_halving(cut_blocks(chunk).double().square()) for chunk in chunks])

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
        rest = checksum_at + CHECKSUM_BYTES
        out[:, len(front) :] = payloads
        out[:, : len(front)] = torch.tensor(list(front), dtype=torch.uint8, device="cpu")
        for frame in out.numpy():
            checksum = zlib.crc32(frame[rest:].tobytes(), zlib.crc32(frame[:checksum_at].tobytes()))
            frame[checksum_at:rest] = list(checksum.to_bytes(CHECKSUM_BYTES, "little"))

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
        checksum_at, rest = expected.checksum_at, expected.checksum_at + CHECKSUM_BYTES
        intact, present, is_expected = [], [], True
        for number, frame in enumerate(rows.numpy()):
            checksum = zlib.crc32(frame[rest:].tobytes(), zlib.crc32(frame[:checksum_at].tobytes()))
            intact.append(
                frame[checksum_at:rest].tobytes() == checksum.to_bytes(CHECKSUM_BYTES, "little")
            )
            head = heads[number * len(mask) :][: len(mask)]
            pairs = zip(frame.tolist(), head, mask, strict=False)
            is_expected &= intact[-1] and not any(
                (found ^ wanted) & bits for found, wanted, bits in pairs
            )
            presence = frame[expected.presence_at :]
            if expected.has_counts:
                numbers = presence[: 2 * expected.n_params].reshape(-1, 2).tolist()
                present.append([low + 256 * high for low, high in numbers])
            else:
                bits = np.unpackbits(presence, count=expected.n_params, bitorder="little")
                present.append(bits.tolist())
        counts = torch.tensor(present, dtype=torch.int64, device="cpu")
        flags = torch.tensor(intact, dtype=torch.bool, device="cpu")
        return is_expected, flags, counts.view(len(rows), expected.n_params)


# Directions and momenta.


def _round32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32).item()


def _widened_grad(grad: Tensor, coefficients: Coefficients) -> Tensor:
    g = grad.view(-1).float()
    return g if coefficients.grad_scale == 1.0 else g.mul(_round32(coefficients.grad_scale))


def _blend(beta: float, exp_avg: Tensor, g: Tensor) -> Tensor:
    """Blend as fl(fl(beta * m) + fl((1 - beta) * g)): c for beta1, the new momentum for beta2."""
    return exp_avg.view(-1).float().mul(_round32(beta)).add(g.mul(_round32(1.0 - beta)))


def _direction(segment: Segment, grad: Tensor) -> Tensor:
    g = _widened_grad(grad, segment.coefficients)
    return _blend(segment.coefficients.beta1, segment.exp_avg, g)


def _new_momentum(segment: Segment, grad: Tensor) -> Tensor:
    g = _widened_grad(grad, segment.coefficients)
    return _blend(segment.coefficients.beta2, segment.exp_avg, g).to(segment.exp_avg.dtype)


def _mask(c: Tensor, segment: Segment, grad: Tensor) -> Tensor:
    """Mask a cautious parameter's direction: c where it has the sign of g, else +0."""
    if not segment.coefficients.cautious:
        return c
    g = _widened_grad(grad, segment.coefficients)
    return torch.where(((c > 0) & (g > 0)) | ((c < 0) & (g < 0)), c, 0.0)


def _checked_direction(
    segment: Segment, grad: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute the direction, rounded to ``dtype``, and () bool: it and the new momentum are finite.

    A gradient that is not finite shows in the direction, since 1 - beta1 > 0; the mask comes last,
    as it would hide it.
    """
    c = _direction(segment, grad)
    finite = c.to(dtype).isfinite().all() & _new_momentum(segment, grad).isfinite().all()
    return _mask(c, segment, grad).to(dtype), finite


# Encoding. Non-finite values are masked, as a test for them would wait for the device.


def _encode(
    segments: Sequence[Segment],
    out: Tensor,
    planes_of: Callable[[Tensor, Segment], Sequence[Tensor]],
) -> Tensor:
    """Write the words ``planes_of(c, segment)`` of every finite direction; all else is zeros."""
    planes = out.new_zeros(out.shape[1], out.shape[0] * BLOCK_WORDS)
    finite = torch.ones(len(segments), dtype=torch.bool, device=out.device)
    for index, segment in enumerate(segments):
        if segment.grad is None:
            continue
        slot = segment.slot
        c, finite[index] = _checked_direction(segment, segment.grad)
        for plane, words in enumerate(planes_of(c, segment)):
            kept = words.masked_fill(~finite[index], 0)
            planes[plane, slot.bucket_word : slot.bucket_word + slot.n_words] = kept
    interleave(planes, out)
    return finite


def _sign_words(c: Tensor, slot: Slot, zero: Coin) -> Tensor:
    """Return a bit for each element: 1 where c > 0, the coin's where c = 0."""
    return pack(c > 0) | (pack(c == 0) & coin_bits(zero, slot, device=c.device))


def _levels(c: Tensor, norm: Literal["l1", "linf"], step: float, highest: int) -> Tensor:
    """Quantize: a = min(floor(fl(|c| * r)), highest), (n,) uint8."""
    blocks = cut_blocks(c.abs())
    scale = mean_by_halving(blocks, c.numel()) if norm == "l1" else blocks.amax(1)
    inverse = (1.0 / (scale.double() * step)).clamp(max=FLOAT32_MAX).float()
    inverse = inverse.masked_fill(scale == 0, 0.0)
    levels = (blocks * inverse.unsqueeze(1)).floor().clamp(max=float(highest))
    return levels.to(torch.uint8).view(-1)[: c.numel()]


def _read_directions(
    kernels: Kernels, segments: Sequence[Segment], packed: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the directions of a bucket; zeros where one is not finite.

    Returns:
        (512 blocks,) float32, of as many blocks as ``packed`` has; and the op's flags.
    """
    directions = packed.new_empty(packed.shape[0], FLOAT_PLANES, BLOCK_WORDS)
    finite = kernels.encode_directions(segments, dtype=torch.float32, out=directions)
    return directions.view(-1).view(torch.float32), finite


def _mean_of(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen sizes; 0 for none."""
    return tree_mean(sizes.masked_fill(~chosen, 0.0), chosen.sum().clamp(min=1))


# Committing.


def _replied(planes: Tensor, slot: Slot, present: int, reply_format: ReplyFormat) -> Tensor:
    """Read the integers S of one parameter, (n,) float32, from (planes, words)."""
    words = planes[:, slot.bucket_word : slot.bucket_word + slot.n_words]
    bits = unpack(words, slot.n_elements).to(torch.int32)
    if reply_format is ReplyFormat.COUNT:
        weights = 2 ** torch.arange(bits.shape[0], dtype=torch.int32, device=bits.device)
        return (2 * (bits * weights.unsqueeze(1)).sum(0) - present).float()
    sign = 2 * bits[0] - 1
    return (sign if reply_format is ReplyFormat.SIGN else sign * bits[1]).float()


def _move(segment: Segment, s: Tensor, divisor: int, rounding: Coin | None) -> None:
    """Write fl(fl(d * x) - fl(a * S)), rounded to the parameter's dtype; a = lr / divisor."""
    hyper = segment.coefficients
    decay = _round32(1.0 - hyper.lr * hyper.weight_decay)
    param = segment.param.view(-1)
    x = param.float().mul(decay).sub(s.mul(_round32(hyper.lr / divisor)))
    if rounding is not None and param.dtype == torch.bfloat16:
        x = _round_stochastically(x, rounding, segment.slot)
    param.copy_(x)


def _round_stochastically(x: Tensor, rounding: Coin, slot: Slot) -> Tensor:
    """Round to bfloat16's values: add 16 random bits below its mantissa, then cut them off."""
    noise = draw_lots(rounding, slot, device=x.device)
    rounded = ((x.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)
