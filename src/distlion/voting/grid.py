"""Process groups of an optimizer's own: nothing but its own bytes crosses them."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from distlion.transport import own_group


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
