"""Process groups of our own: of the ranks of a node, of their peers, of votes during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from distlion.errors import ProcessGroupError

_Made = TypeVar("_Made")


class NodeGroups:
    """The two process groups of a rank: the ranks of its node, and its peers in other nodes.

    Args:
        process_group: All workers.
        size: Ranks of a node.
        timeout_s: For making them, and the longest that an operation on them may take.

    Raises:
        ProcessGroupError: Some worker did not come to make them.
    """

    def __init__(self, process_group: dist.ProcessGroup, size: int, timeout_s: float) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        node, local = divmod(dist.get_rank(process_group), size)
        self.inside_ranks = tuple(range(node * size, (node + 1) * size))
        self.between_ranks = tuple(range(local, len(ranks), size))
        self.inside = _new_group([ranks[rank] for rank in self.inside_ranks], timeout_s)
        self.between = _new_group([ranks[rank] for rank in self.between_ranks], timeout_s)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, object]] = (
    weakref.WeakKeyDictionary()
)


def node_groups(process_group: dist.ProcessGroup, size: int, timeout_s: float) -> NodeGroups:
    """Return the groups for nodes of ``size``; made when first asked for, by all workers."""
    return _make_once(process_group, size, lambda: NodeGroups(process_group, size, timeout_s))


def own_group(
    process_group: dist.ProcessGroup, timeout_s: float, *, purpose: str = "overlap"
) -> dist.ProcessGroup:
    """Return one more group of the same workers, made when first asked for, by all of them.

    What leaves on a thread would mix with the caller's own collectives on the first group.
    """
    ranks = dist.get_process_group_ranks(process_group)
    return _make_once(process_group, purpose, lambda: _new_group(ranks, timeout_s))


def _make_once(process_group: dist.ProcessGroup, key: object, make: Callable[[], _Made]) -> _Made:
    made = _groups.setdefault(process_group, {})
    if key not in made:
        made[key] = make()
    found: _Made = made[key]  # type: ignore[assignment]
    return found


def _new_group(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
        )
    except RuntimeError as error:
        raise ProcessGroupError(
            f"no process group of the global ranks {ranks} came about within {timeout_s:g} s "
            f"({error}); does every worker make the optimizer, with the same nodes= and overlap=?"
        ) from error
    return group
