"""Arguments of all ops of the arithmetic: notation, dtypes, coins, packed tensors and records.

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

``reference.py`` and ``counting.py`` document each op, and define its correct result in plain torch;
``dispatch.py`` chooses a backend.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from distlion.layout import Slot

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXP_AVG_DTYPES = (torch.float32, torch.bfloat16)
SCALE_BLOCK_ELEMENTS = 4096
CHECKSUM_BYTES = 4
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT_PLANES = 32
"""Planes of packed float32 values, a block's values one after the other."""

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
