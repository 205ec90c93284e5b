"""Process groups of an optimizer's own: nothing but its own bytes crosses them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from distlion.errors import ProcessGroupError
from distlion.exchange import keep_forever, store_of, tidy


class Grid(NamedTuple):
    """Where a rank stands among all, of which several may act as one worker.

    Attributes:
        inside: The ranks that act as one worker with this one: those of its node, or those that
            hold the shards of its worker's parameters; in their order.
        between: Its peers in other workers: who votes for the same pieces, or the same shards.
    """

    inside: tuple[int, ...]
    between: tuple[int, ...]

    @classmethod
    def of_nodes(cls, rank: int, world_size: int, size: int) -> Grid:
        """Return that of a rank among nodes of ``size`` ranks that follow each other."""
        node, local = divmod(rank, size)
        inside = range(node * size, (node + 1) * size)
        return cls(tuple(inside), tuple(range(local, world_size, size)))


class GridGroups:
    """The two process groups of a rank: those of its worker, and its peers in other workers.

    Args:
        process_group: All ranks.
        grid: Where this one stands.
        name: Of the optimizer, unlike that of any other on ``process_group``.
        timeout_s: For making them, and the longest that an operation on them may take.

    Raises:
        ProcessGroupError: Some worker did not come to make them.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, grid: Grid, *, name: str, timeout_s: float
    ) -> None:
        self.inside = own_group(
            process_group,
            name=f"{name}/inside {grid.inside[0]}",
            timeout_s=timeout_s,
            ranks=grid.inside,
        )
        self.between = own_group(
            process_group,
            name=f"{name}/between {grid.between[0]}",
            timeout_s=timeout_s,
            ranks=grid.between,
        )


def own_group(
    process_group: dist.ProcessGroup,
    *,
    name: str,
    timeout_s: float,
    ranks: Sequence[int] | None = None,
) -> dist.ProcessGroup:
    """Make a Gloo group of workers of another group; all of them must call it.

    It has the methods of any group, and ends when it is let go of. ``dist.new_group`` does not make
    it: that one names groups of some ranks by how many groups a process is in, which may differ
    between ranks, all the more with ours among them; they would wait for each other in vain.

    Args:
        process_group: Where the workers are from.
        name: Of the group, unlike that of any other made of ``process_group``.
        timeout_s: For making it, and the longest that an operation on it may take.
        ranks: Of its members in ``process_group``, this process among them; None for all.

    Raises:
        ProcessGroupError: Some worker did not come to make it.
    """
    members = range(process_group.size()) if ranks is None else ranks
    store = PrefixStore(f"distlion/{name}", store_of(process_group))
    rank, timeout = members.index(process_group.rank()), timedelta(seconds=timeout_s)
    try:
        group = cast(dist.ProcessGroup, ProcessGroupGloo(store, rank, len(members), timeout))
    except RuntimeError as error:
        raise ProcessGroupError(
            f"no connections between ranks {', '.join(map(str, members))} came about within "
            f"{timeout_s:g} s ({tidy(error)}); is each of them still running, and can it reach "
            "the others?"
        ) from error
    _alive.add(group)
    return group


_alive: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _keep_all() -> None:
    """In a fork: never end a group, whose threads are in the other process."""
    for group in _alive:
        keep_forever(group)


os.register_at_fork(after_in_child=_keep_all)
