"""SparseLoCo's message: the largest accumulated elements, in two bits each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.base import SCALAR_BYTES, Compression, CompressionStep, Payload, State
from distlion_lab.baselines.ring import FLOAT32_BYTES
from distlion_lab.baselines.sparse import check_fraction, count_kept

BLOCK_ELEMENTS = 4096
"""Number of elements in a block: a place in it takes 12 bits."""
PLACE_BITS, CODE_BITS = 12, 2
_ENTRY_BITS = PLACE_BITS + CODE_BITS
_SCALES_BYTES = 2 * SCALAR_BYTES


@dataclass(frozen=True)
class TopBitsPayload(Payload):
    """Some elements of a tensor, each by its place and a code of two bits.

    Attributes:
        places: (k,) int16, rising within each block of 4,096 elements, in which they count from 0.
        codes: (k,) uint8: bit 0 is set if the value is above 0, bit 1 if it is large.
        scales: (2,) float32, the magnitudes of small values and of large ones.
    """

    places: Tensor
    codes: Tensor
    scales: Tensor

    @property
    def n_bytes(self) -> int:
        return _SCALES_BYTES + -(-_ENTRY_BITS * self.places.numel() // 8)

    @property
    def values(self) -> Tensor:
        """Value of each element, (k,) float32."""
        large, plus = self.codes.long() >> 1, (self.codes & 1).bool()
        magnitudes = self.scales[large]
        return torch.where(plus, magnitudes, -magnitudes)

    def to_wire(self) -> Tensor:
        entries = (self.places.long() << CODE_BITS) | self.codes.long()
        shifts = torch.arange(_ENTRY_BITS - 1, -1, -1, device=entries.device)
        bits = ((entries[:, None] >> shifts) & 1).to(torch.uint8).flatten()
        packed = torch.from_numpy(np.packbits(bits.cpu().numpy())).to(entries.device)
        return torch.cat([self.scales.view(torch.uint8), packed])


@dataclass(frozen=True)
class TopBits(Compression):
    """Send the largest accumulated elements in two bits each, and keep the rest.

    Equation:
        e = beta * e + d;  q = Q(top(e));  e = e - q;  workers step on the mean of all q
        (SparseLoCo, arXiv:2508.15706, Algorithm 1)
        d is ``grad``, e the state's ``residual``. ``top`` takes the ``keep`` largest magnitudes of
        each block of 4,096 elements. Q keeps the sign and one of two magnitudes. The small one is
        the mean of the taken magnitudes that do not exceed the mean of all taken ones, and the
        large one is the mean of the others.

    Args:
        keep: Fraction of a block to send, in (0, 1]; to the nearest element, and at least one.
        decay: Decay beta of the residual, in [0, 1].

    Raises:
        InvalidArgumentError: A number is out of its range.

    Notes:
        Blocks begin anew in each parameter. ``torch.topk`` chooses among equal magnitudes. A taken
        element of 0 counts as minus the small magnitude. The quantizer is our reading of the
        paper's two bits; the paper does not define its bins.
    """

    keep: float = 1 / 64
    decay: float = 0.95

    def __post_init__(self) -> None:
        check_fraction("TopBits", "keep", self.keep)
        if not 0 <= self.decay <= 1:
            raise InvalidArgumentError(
                f"TopBits(decay={self.decay}): expected a number from 0 to 1"
            )

    def create_state(self, n_elements: int, device: torch.device) -> State:
        return {"residual": torch.zeros(n_elements, dtype=torch.float32, device=device)}

    def compress(self, grad: Tensor, state: State, at: CompressionStep) -> tuple[Payload, State]:
        residual = self.decay * state["residual"] + grad
        indices = self._take_largest(residual.abs())
        payload = _quantize(residual[indices], indices)
        residual[indices] -= payload.values
        return payload, {"residual": residual}

    def _take_largest(self, magnitudes: Tensor) -> Tensor:
        """Return the ascending indices of the largest elements of each block, (k,) int64."""
        n_whole = magnitudes.numel() // BLOCK_ELEMENTS
        blocks = magnitudes[: n_whole * BLOCK_ELEMENTS].view(n_whole, BLOCK_ELEMENTS)
        each = count_kept(BLOCK_ELEMENTS, self.keep)
        places = blocks.topk(each, dim=1, sorted=False).indices.sort(dim=1).values
        begins = BLOCK_ELEMENTS * torch.arange(n_whole, device=magnitudes.device)
        found = [(places + begins[:, None]).flatten()]
        rest = magnitudes[n_whole * BLOCK_ELEMENTS :]
        if rest.numel():
            kept = count_kept(rest.numel(), self.keep)
            last = rest.topk(kept, sorted=False).indices.sort().values
            found.append(last + n_whole * BLOCK_ELEMENTS)
        return torch.cat(found)

    def _locate(self, payload: TopBitsPayload, n_elements: int) -> Tensor:
        """Return the indices of a payload in its parameter, (k,) int64."""
        each = count_kept(BLOCK_ELEMENTS, self.keep)
        blocks = torch.arange(payload.places.numel(), device=payload.places.device) // each
        # The last block is shorter and may hold fewer elements than a whole one.
        blocks = blocks.clamp(max=(n_elements - 1) // BLOCK_ELEMENTS)
        return BLOCK_ELEMENTS * blocks + payload.places.long()

    def aggregate(self, payloads: Sequence[Payload], n_elements: int) -> Tensor:
        taken = [_read(payload) for payload in payloads]
        total = torch.zeros(n_elements, dtype=torch.float32, device=taken[0].scales.device)
        for payload in taken:
            # No index comes twice in a payload, so entries are added in rank order.
            total.index_add_(0, self._locate(payload, n_elements), payload.values)
        return total.div_(len(taken))

    def reply_bytes(self, payloads: Sequence[Payload], n_elements: int) -> int:
        """Count all payloads, which a server would pass on, or 4 bytes per element if fewer."""
        return min(sum(payload.n_bytes for payload in payloads), FLOAT32_BYTES * n_elements)

    def read(self, wire: Tensor, n_elements: int, *, scalar: Tensor) -> TopBitsPayload:
        wire = wire.clone()
        bits = np.unpackbits(wire[_SCALES_BYTES:].cpu().numpy())
        whole = bits[: len(bits) - len(bits) % _ENTRY_BITS].reshape(-1, _ENTRY_BITS)
        entries = torch.from_numpy(whole).to(wire.device).long() @ (
            1 << torch.arange(_ENTRY_BITS - 1, -1, -1, device=wire.device)
        )
        return TopBitsPayload(
            (entries >> CODE_BITS).to(torch.int16),
            (entries & (1 << CODE_BITS) - 1).to(torch.uint8),
            wire[:_SCALES_BYTES].view(torch.float32),
        )


def _quantize(values: Tensor, indices: Tensor) -> TopBitsPayload:
    magnitudes = values.abs()
    is_large = magnitudes > magnitudes.mean()
    scales = torch.stack([_mean_of(magnitudes, ~is_large), _mean_of(magnitudes, is_large)])
    codes = is_large.to(torch.uint8) << 1 | (values > 0).to(torch.uint8)
    return TopBitsPayload((indices % BLOCK_ELEMENTS).to(torch.int16), codes, scales)


def _mean_of(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen magnitudes, () float32; 0 where none is chosen."""
    return (magnitudes * chosen).sum() / chosen.sum().clamp(min=1)


def _read(payload: Payload) -> TopBitsPayload:
    assert isinstance(payload, TopBitsPayload)
    return payload
