"""Gradients that have arrived in a backward pass, and detection of later changes to them."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from distlion.step.param import SPARSE, GradientMark, VotingParam, local_tensor

SAMPLE_ELEMENTS = 64
"""Sampled elements of each gradient; a smaller gradient repeats some."""
_GOLDEN = 0.618
"""A step that moves samples by another part of their distance each, so not all into one column."""


class Arrivals:
    """The gradients that have arrived in a step under overlap; the vote misses later changes.

    A mark detects another tensor, other memory, and any move of a version counter. Writes through
    ``data`` or ``numpy()`` move none, nor does torch's clipping on a DTensor: a sample of each
    gradient, spread over all of it, detects them.

    FSDP2 reduces the gradients of a block into one buffer, whose views share a version counter:
    adding to one of them, as accumulation does, counts for all. So a shard is compared with the
    last count of its buffer that arrivals explain: one for each addition to an existing gradient,
    none for a new gradient.
    """

    def __init__(self) -> None:
        self._marks: dict[int, GradientMark] = {}
        self._samples: dict[int, Tensor] = {}
        self._places: dict[tuple[int, torch.device], Tensor] = {}  # of samples, by their source
        self._twice: set[int] = set()
        self._buffers: dict[int, int] = {}  # of shards: the start of their shared memory
        self._counts: dict[int, int | None] = {}  # by buffer; None where one is unexplained
        # Also of earlier backward passes, to know what is added to. Weak, as zero_grad() frees
        # them.
        self._before: dict[int, weakref.ref[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def note(self, param: VotingParam) -> bool:
        """Note that a gradient is complete; return whether it is the first of its parameter."""
        position = param.position
        if position in self._marks:
            self._twice.add(position)
            return False
        mark = self._marks[position] = param.mark()
        if mark.grad is None or mark.version == SPARSE:
            return True
        local = local_tensor(mark.grad)
        if local.numel():
            self._samples[position] = self._draw(local)
        if param.is_sharded:
            self._note_shard(position, mark.grad, local)
        return True

    def remember(self, param: VotingParam) -> None:
        """Note a gradient to which a later backward pass may add."""
        grad = param.param.grad
        if param.is_sharded and grad is not None:
            self._before[param.position] = weakref.ref(grad)

    def list_changed(self) -> list[int]:
        """List the positions of gradients that were written to or replaced since, or came twice.

        Changes that only samples show are not listed.
        """
        changed = {position for position, mark in self._marks.items() if mark.has_changed()}
        return sorted(changed | self._list_changed_shards() | self._twice)

    def compare_samples(self, device: torch.device) -> SampledChanges:
        """Compare gradients with their samples, without waiting for a device.

        Args:
            device: Device on which the answer is read.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position, sample in self._samples.items():
            if not self._marks[position].has_changed():  # else its size may differ
                kinds.setdefault((sample.device, sample.dtype), []).append(position)
        positions, flags = [], [torch.zeros(0, dtype=torch.bool, device=device)]
        for alike in kinds.values():
            before = torch.stack([self._samples[position] for position in alike])
            now = torch.stack([self._draw(self._find_local(position)) for position in alike])
            # As bytes, so that NaNs equal themselves.
            differ = before.view(torch.uint8) != now.view(torch.uint8)
            flags.append(differ.any(1).to(device))
            positions += alike
        return SampledChanges(positions, torch.cat(flags))

    def clear(self) -> None:
        """Begin another step."""
        self._marks, self._samples, self._buffers, self._counts = {}, {}, {}, {}
        self._twice = set()

    def _note_shard(self, position: int, grad: Tensor, shard: Tensor) -> None:
        buffer = shard.untyped_storage().data_ptr()
        if not buffer:
            return  # an empty shard by itself; one in a buffer counts there
        before = self._before.get(position)
        n_counts = int(before is not None and before() is grad)
        count: int | None = shard._version
        if buffer in self._counts:
            last = self._counts[buffer]
            if last is None or count != last + n_counts:
                count = None
        self._counts[buffer] = count
        self._buffers[position] = buffer
        self._before[position] = weakref.ref(grad)

    def _list_changed_shards(self) -> set[int]:
        return {
            position
            for position, buffer in self._buffers.items()
            if self._find_local(position)._version != self._counts[buffer]
        }

    def _find_local(self, position: int) -> Tensor:
        grad = self._marks[position].grad
        assert grad is not None
        return local_tensor(grad)

    def _draw(self, local: Tensor) -> Tensor:
        """Copy (64,) elements, spread over all, on the gradient's device."""
        source = local.numel(), local.device
        if source not in self._places:
            numbers = torch.arange(SAMPLE_ELEMENTS, device=local.device)
            begins = numbers * local.numel() // SAMPLE_ELEMENTS
            within = numbers * _GOLDEN % 1 * (local.numel() // SAMPLE_ELEMENTS)
            self._places[source] = begins + within.long()
        return local.detach().take(self._places[source])


class SampledChanges(NamedTuple):
    """The gradients that differ from their samples.

    Attributes:
        positions: Positions of the compared parameters.
        flags: (n,) bool: whether each differs; may still be under way.
    """

    positions: list[int]
    flags: Tensor

    def list_changed(self, flags: Tensor) -> list[int]:
        """List the flagged positions; ``flags`` are on the host."""
        return [self.positions[index] for index in flags.nonzero().flatten().tolist()]
