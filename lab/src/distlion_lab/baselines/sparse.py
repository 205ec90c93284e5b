"""The common part of GradDrop and DGC: a few entries of a tensor, as values and indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion_lab.baselines.base import Compression, Payload
from distlion_lab.baselines.ring import FLOAT32_BYTES

INDEX_BYTES = 4
ENTRY_BYTES = FLOAT32_BYTES + INDEX_BYTES
_MAX_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class SparsePayload(Payload):
    """Some entries of a tensor.

    Attributes:
        indices: (k,) int64, rising; int32 on the wire.
        values: (k,) float32.
    """

    indices: Tensor
    values: Tensor

    @classmethod
    def pick(cls, dense: Tensor, indices: Tensor) -> SparsePayload:
        """Take entries out of a tensor.

        Args:
            dense: (n,) float32. Read only.
            indices: (k,) int64, rising. Read only.

        Raises:
            UnsupportedTypeError: The tensor is too long for indices of 32 bits.
        """
        if dense.numel() > _MAX_ELEMENTS:
            raise UnsupportedTypeError(
                f"a parameter has {dense.numel()} elements; sparse payloads have indices of 32 "
                f"bits, for {_MAX_ELEMENTS} at most: split the parameter"
            )
        return cls(indices, dense[indices])

    @property
    def n_bytes(self) -> int:
        return ENTRY_BYTES * self.indices.numel()

    def to_wire(self) -> Tensor:
        return torch.cat([self.indices.int().view(torch.uint8), self.values.view(torch.uint8)])


class SparseCompression(Compression):
    """A method whose payloads are entries; their sum has the union of their indices."""

    def aggregate(self, payloads: Sequence[Payload], n_elements: int) -> Tensor:
        entries = [_sparse(payload) for payload in payloads]
        total = torch.zeros(n_elements, dtype=torch.float32, device=entries[0].values.device)
        for payload in entries:
            # No index comes twice in a payload, so entries are added in rank order.
            total.index_add_(0, payload.indices, payload.values)
        return total.div_(len(entries))

    def reply_bytes(self, payloads: Sequence[Payload], n_elements: int) -> int:
        """Count 8 bytes for each index that any worker sent, or 4 for each element if fewer."""
        entries = [_sparse(payload) for payload in payloads]
        union = torch.zeros(n_elements, dtype=torch.bool, device=entries[0].values.device)
        for payload in entries:
            union.index_fill_(0, payload.indices, True)
        return min(ENTRY_BYTES * int(union.sum()), FLOAT32_BYTES * n_elements)

    def read(self, wire: Tensor, n_elements: int, *, scalar: Tensor) -> SparsePayload:
        indices, values = wire.clone().chunk(2)
        return SparsePayload(indices.view(torch.int32).long(), values.view(torch.float32))


def count_kept(n_elements: int, keep: float) -> int:
    """Return the number of elements in a fraction, to the nearest, and at least one."""
    return max(1, round(keep * n_elements))


def check_fraction(owner: str, name: str, value: float) -> None:
    """Check that a setting lies in (0, 1].

    Raises:
        InvalidArgumentError: It lies outside.
    """
    if not 0 < value <= 1:
        raise InvalidArgumentError(f"{owner}({name}={value}): expected a number in (0, 1]")


def _sparse(payload: Payload) -> SparsePayload:
    assert isinstance(payload, SparsePayload)
    return payload
