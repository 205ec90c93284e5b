"""TernGrad: an unbiased random choice of three levels for each element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.base import SCALAR_BYTES, Compression, CompressionStep, Payload, State

_BITS = 2
_PER_BYTE = 8 // _BITS


@dataclass(frozen=True)
class TernaryPayload(Payload):
    """Levels of -1, 0 and 1.

    Attributes:
        scale: () float32, shared by all workers; exchanged before, so not part of the payload.
        levels: (n,) int8. On the wire, level + 1 of element j is in bits 2 (j % 4) and up of
            byte j // 4; spare bits are 0.
    """

    scale: Tensor
    levels: Tensor

    @property
    def n_bytes(self) -> int:
        return -(-self.levels.numel() // _PER_BYTE)

    def to_wire(self) -> Tensor:
        spare = -self.levels.numel() % _PER_BYTE
        codes = torch.nn.functional.pad((self.levels + 1).view(torch.uint8), (0, spare))
        rows = codes.view(-1, _PER_BYTE) << _shifts(codes.device)
        return rows.sum(dim=1, dtype=torch.uint8)


@dataclass(frozen=True)
class TernGrad(Compression):
    """Send a random level of -1, 0 or 1 for each element, with the clipped gradient as its mean.

    Equation:
        g' = clamp(g, -c sigma, c sigma);  s = max_i max |g'_i|, over elements and workers i
        t_i = sign(g'_i) b_i, P(b_i = 1) = |g'_i| / s;  mean = (s / N) sum_i t_i
        (TernGrad, arXiv:1705.07878, equations 1 to 3 and section 4: clipping, scaler sharing)
        c is ``clip``; s is ``scale``, one for each parameter.

    Args:
        clip: Number of standard deviations at which a gradient is clipped, above 0.

    Raises:
        InvalidArgumentError: ``clip`` is not a finite number above 0.

    Notes:
        sigma is taken about 0, the mean that the paper's analysis assumes. About the mean of its
        gradient, a parameter of one element could never move.
        A gradient of only zeros has scale 0 and stays 0.
        Bytes: the paper counts log2(3) = 1.585 bits an element, often quoted as 1.5. This class
        counts the 2 bits of a packed level, and ceil(log2(2 N + 1)) for the sum. The scale adds
        4 bytes each way. Levels are drawn with a granularity of 2^-24 of the scale.
    """

    clip: float = 2.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise InvalidArgumentError(
                f"TernGrad(clip={self.clip}): expected a finite number above 0"
            )

    @property
    def shares_scalar(self) -> bool:
        return True

    def measure(self, grad: Tensor) -> Tensor:
        deviation = torch.linalg.vector_norm(grad, dtype=torch.float64) / math.sqrt(grad.numel())
        largest = torch.linalg.vector_norm(grad, ord=math.inf)
        return torch.minimum(largest, (self.clip * deviation).float())

    def compress(self, grad: Tensor, state: State, at: CompressionStep) -> tuple[Payload, State]:
        bound = self.measure(grad)
        clipped = grad.clamp(-bound, bound)
        draws = torch.rand(
            grad.shape, generator=at.generator, dtype=torch.float32, device=grad.device
        )
        # draws < |g| / s without the division: a scale of 0 needs no special case.
        levels = clipped.sign().mul_(draws.mul_(at.scalar) < clipped.abs())
        return TernaryPayload(at.scalar, levels.to(torch.int8)), state

    def aggregate(self, payloads: Sequence[Payload], n_elements: int) -> Tensor:
        first = _ternary(payloads[0])
        total = torch.zeros(n_elements, dtype=torch.int32, device=first.levels.device)
        for payload in payloads:
            total += _ternary(payload).levels
        return total * (first.scale / len(payloads))

    def reply_bytes(self, payloads: Sequence[Payload], n_elements: int) -> int:
        bits = (2 * len(payloads)).bit_length()  # ceil(log2(2 N + 1))
        return -(-n_elements * bits // 8) + SCALAR_BYTES

    def read(self, wire: Tensor, n_elements: int, *, scalar: Tensor) -> TernaryPayload:
        codes = (wire.unsqueeze(1) >> _shifts(wire.device)) & 3
        return TernaryPayload(scalar, codes.flatten()[:n_elements].view(torch.int8) - 1)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 8, _BITS, dtype=torch.uint8, device=device)


def _ternary(payload: Payload) -> TernaryPayload:
    assert isinstance(payload, TernaryPayload)
    return payload
