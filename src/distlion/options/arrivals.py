"""Gradients that have arrived in a backward pass, and which of them have changed since."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from distlion.step import SPARSE, GradientMark, VotingParam, local_tensor

SAMPLE_ELEMENTS = 64
"""Of each gradient; of one that has fewer, some stand in its sample more than once."""


class Arrivals:
    """The gradients that have arrived in a step under overlap; the vote misses later changes.

    A mark sees another tensor, other memory, and whatever moves a version counter. Writes through
    ``data`` or ``numpy()`` move none, nor does torch's clipping on a DTensor: they are found by a
    sample of each gradient, spread over all of it.

    FSDP2 reduces the gradients of a block into one buffer, whose views share a version counter: to
    add to one of them, as accumulation does, counts for all. So a shard is compared with the last
    count of its buffer that arrivals explain: one each where something was added to a gradient
    that was there before, none where the gradient is new.
    """

    def __init__(self) -> None:
        self._marks: dict[int, GradientMark] = {}
        self._samples: dict[int, Tensor] = {}
        self._places: dict[tuple[int, torch.device], Tensor] = {}  # of samples, by their source
        self._twice: set[int] = set()
        self._buffers: dict[int, int] = {}  # of shards: where the memory begins that they share
        self._counts: dict[int, int | None] = {}  # by buffer; None where one is unexplained
        # Of earlier backward passes too, to know what is added to. Weakly: zero_grad() lets go.
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
        if not local.numel():
            return True  # there is nothing that could change, and no buffer
        self._samples[position] = self._draw(local)
        if param.is_sharded:
            self._note_shard(position, mark.grad, local)
        return True

    def remember(self, param: VotingParam) -> None:
        """Note a gradient that waits for more to be added to it."""
        grad = param.param.grad
        if param.is_sharded and grad is not None:
            self._before[param.position] = weakref.ref(grad)

    def list_changed(self) -> list[int]:
        """List the positions of gradients that were written to or replaced since, or came twice.

        Those are left out that only samples tell of.
        """
        changed = {position for position, mark in self._marks.items() if mark.has_changed()}
        return sorted(changed | self._list_changed_shards() | self._twice)

    def compare_samples(self, device: torch.device) -> SampledChanges:
        """Compare gradients with their samples, without waiting for a device.

        Args:
            device: Where the answer is read.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position, sample in self._samples.items():
            if not self._marks[position].has_changed():  # else it may be of another size
                kinds.setdefault((sample.device, sample.dtype), []).append(position)
        positions, flags = [], [torch.zeros(0, dtype=torch.bool, device=device)]
        for alike in kinds.values():
            before = torch.stack([self._samples[position] for position in alike])
            now = torch.stack([self._draw(self._find_local(position)) for position in alike])
            # As bytes: NaNs are equal to themselves then.
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
        """Copy some elements, spread over all: (64,), where the gradient is."""
        source = local.numel(), local.device
        if source not in self._places:
            numbers = torch.arange(SAMPLE_ELEMENTS, device=local.device)
            self._places[source] = numbers * local.numel() // SAMPLE_ELEMENTS
        return local.detach().take(self._places[source])


class SampledChanges(NamedTuple):
    """The gradients that differ from their samples.

    Attributes:
        positions: Of their parameters.
        flags: (n,) bool, whether each of them does. Perhaps still on its way.
    """

    positions: list[int]
    flags: Tensor

    def list_changed(self, flags: Tensor) -> list[int]:
        """List the positions that are flagged; ``flags`` as they are on the host."""
        return [self.positions[index] for index in flags.nonzero().flatten().tolist()]
