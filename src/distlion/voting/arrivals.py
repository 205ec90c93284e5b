"""Gradients that have arrived in a backward pass, and which of them have changed since."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from distlion.voting.param import GradientMark, VotingParam, local_tensor

SAMPLE_ELEMENTS = 64
"""Of each sharded gradient."""


class ShardMark(NamedTuple):
    """What a GradientMark does not see of a sharded gradient.

    Attributes:
        buffer: Where the storage begins that it shares with others, and with it a version counter.
        sample: Some of its elements, as bytes. ``torch.nn.utils.clip_grad_norm_`` writes to
            DTensors by ops that move no counter.
    """

    buffer: int
    sample: Tensor


class Arrivals:
    """What has arrived in a step under overlap; a change after that would not be in the vote.

    FSDP2 reduces the gradients of a block into one buffer, whose views share a version counter: to
    add to one of them, as accumulation does, counts for all. So a shard is compared with the last
    count of its buffer that arrivals explain: one each where something was added to a gradient
    that was there before, none where the gradient is new.
    """

    def __init__(self) -> None:
        self._marks: dict[int, GradientMark] = {}
        self._shards: dict[int, ShardMark] = {}
        self._twice: set[int] = set()
        self._counts: dict[int, int | None] = {}  # by buffer; None where one is unexplained
        # Of earlier backward passes too, to know what is added to. Weakly: zero_grad() lets go.
        self._before: dict[int, weakref.ref[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def note(self, param: VotingParam) -> bool:
        """Note that a gradient is complete; return whether it is the first of its parameter."""
        if param.position in self._marks:
            self._twice.add(param.position)
            return False
        mark = self._marks[param.position] = param.mark()
        if param.is_sharded and mark.grad is not None:
            self._note_shard(param.position, mark.grad)
        return True

    def remember(self, param: VotingParam) -> None:
        """Note a gradient that waits for more to be added to it."""
        grad = param.param.grad
        if param.is_sharded and grad is not None:
            self._before[param.position] = weakref.ref(grad)

    def list_changed(self) -> list[int]:
        """List the positions of gradients that were written to or replaced since, or came twice."""
        changed = {position for position, mark in self._marks.items() if mark.has_changed()}
        return sorted(changed | self._list_changed_shards() | self._twice)

    def clear(self) -> None:
        """Begin another step."""
        self._marks, self._shards, self._counts = {}, {}, {}
        self._twice = set()

    def _note_shard(self, position: int, grad: Tensor) -> None:
        shard = local_tensor(grad)
        if not shard.numel():
            return  # there is nothing that could change, and no buffer
        buffer = shard.untyped_storage().data_ptr()
        before = self._before.get(position)
        n_counts = int(before is not None and before() is grad)
        count: int | None = shard._version
        if buffer in self._counts:
            last = self._counts[buffer]
            if last is None or count != last + n_counts:
                count = None
        self._counts[buffer] = count
        self._shards[position] = ShardMark(buffer, _draw(shard))
        self._before[position] = weakref.ref(grad)

    def _list_changed_shards(self) -> set[int]:
        changed, pairs = set(), {}
        for position, mark in self._shards.items():
            grad = self._marks[position].grad
            assert grad is not None
            shard = local_tensor(grad)
            if shard._version != self._counts[mark.buffer]:
                changed.add(position)
            pairs[position] = (_draw(shard) != mark.sample).any()
        if pairs:  # together, so that the host waits for the device once
            differ = torch.stack(list(pairs.values())).tolist()
            changed |= {position for index, position in enumerate(pairs) if differ[index]}
        return changed


def _draw(shard: Tensor) -> Tensor:
    """Copy some elements, spread over all, as bytes: NaNs are equal to themselves then."""
    flat = shard.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)].clone().view(torch.uint8)
