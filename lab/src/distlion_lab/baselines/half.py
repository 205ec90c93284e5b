"""Half precision: the arithmetic of DDP's ``fp16_compress_hook``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion_lab.baselines.base import Compression, CompressionStep, Payload, State

HALF_BYTES = 2


@dataclass(frozen=True)
class HalfPayload(Payload):
    """A gradient, divided by the number of workers.

    Attributes:
        values: (n,) float16.
    """

    values: Tensor

    @property
    def n_bytes(self) -> int:
        return self.values.nbytes

    def to_wire(self) -> Tensor:
        return self.values.view(torch.uint8)


@dataclass(frozen=True)
class HalfPrecision(Compression):
    """Add gradients as float16 numbers.

    Equation:
        mean = sum_i fl16(fl16(g_i) / N), each addition rounded to float16

    Notes:
        The network can add these payloads in an all-reduce: with DDP, use PyTorch's own
        ``fp16_compress_hook``. It may add in another order; for two workers the sums are bitwise
        identical. Sums beyond the range of float16 are infinite.
    """

    @property
    def gathers(self) -> bool:
        return False

    def compress(self, grad: Tensor, state: State, at: CompressionStep) -> tuple[Payload, State]:
        return HalfPayload(grad.half().div_(at.n_workers)), state

    def aggregate(self, payloads: Sequence[Payload], n_elements: int) -> Tensor:
        total = torch.zeros_like(_half(payloads[0]).values)
        for payload in payloads:
            total += _half(payload).values
        return total.float()

    def reply_bytes(self, payloads: Sequence[Payload], n_elements: int) -> int:
        return HALF_BYTES * n_elements

    def read(self, wire: Tensor, n_elements: int, *, scalar: Tensor) -> HalfPayload:
        return HalfPayload(wire.clone().view(torch.float16))


def _half(payload: Payload) -> HalfPayload:
    assert isinstance(payload, HalfPayload)
    return payload
