"""The ranks of an optimizer: their number, and the groups of them that act as one worker."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from distlion.errors import ProcessGroupError, UnsupportedTypeError
from distlion.votes.roster import Roster
from distlion.wire.frame import MAX_WORKERS
from distlion.wire.watch import PeerWatch, watch_peers


@dataclass(frozen=True)
class Ranks:
    """All ranks of an optimizer at its construction, seen from one of them.

    Several ranks may act as one *worker*, which has one vote: the ranks of a node, or the ranks
    that hold shards of the same parameters. Ranks then form a grid: each row is a worker, and each
    column the ranks that vote with each other on the same pieces or shards.

    Attributes:
        process_group: All ranks; None for a rank that trains alone.
        rank: The number of this rank in the group.
        n_ranks: Number of ranks.
        inside: The ranks of this worker, in their order.
        between: This rank and its peers, one in each other worker.
        is_sharded: Whether the ranks of a worker hold shards of the parameters.
        members: The roster of the voters, in a crew and with weights; None: workers are numbered by
            rank, and each vote counts once.
        connect_timeout_s: Seconds to make further groups; None: as long as for operations.
        has_own_groups: Whether torch's groups of this process are none of the optimizer's business,
            as in a crew's member of several processes, which has one inside.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    n_ranks: int
    inside: tuple[int, ...]
    between: tuple[int, ...]
    is_sharded: bool = False
    members: Roster | None = None
    connect_timeout_s: float | None = None
    has_own_groups: bool = False

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks of a group, each as a worker of its own.

        Args:
            process_group: The group; None for the default one, or for a single worker where there
                is none.

        Raises:
            ProcessGroupError: There is no group although WORLD_SIZE promises one, this process is
                not in it, or it is too large.
        """
        group = _find_group(process_group)
        rank = 0 if group is None else dist.get_rank(group)
        n_ranks = 1 if group is None else dist.get_world_size(group)
        if n_ranks > MAX_WORKERS:
            raise ProcessGroupError(f"{n_ranks} workers vote; expected {MAX_WORKERS} at most")
        return cls(group, rank, n_ranks, inside=(rank,), between=tuple(range(n_ranks)))

    @classmethod
    def alone(cls) -> Ranks:
        """Return a rank without other voters."""
        return cls(None, 0, 1, inside=(0,), between=(0,))

    def in_nodes(self, size: int) -> Ranks:
        """Return the same ranks, with ``size`` of them in a row as one worker."""
        node, local = divmod(self.rank, size)
        inside = tuple(range(node * size, (node + 1) * size))
        return replace(self, inside=inside, between=tuple(range(local, self.n_ranks, size)))

    @cached_property
    def is_alone(self) -> bool:
        """True if there are no other voters."""
        return self.n_ranks == 1

    @cached_property
    def are_members(self) -> bool:
        """True if they are the members of an epoch of a crew: the next epoch may have others."""
        return self.members is not None and self.members.epoch > 0

    @cached_property
    def come_and_go(self) -> bool:
        """True if the ranks of a worker are a member of a crew, which acts and is lost as a whole.

        Then lane i of a member takes from lane i of another one.
        """
        return self.are_members and len(self.inside) > 1

    @property
    def node_size(self) -> int:
        """Number of ranks of a node; 1 without nodes."""
        return 1 if self.is_sharded else len(self.inside)

    @property
    def row(self) -> int:
        """The row of this rank's worker in tensors of votes."""
        return self.between.index(self.rank)

    @cached_property
    def roster(self) -> Roster:
        """The roster of voters."""
        return self.members or Roster.of(len(self.between))

    @cached_property
    def voter(self) -> int:
        """The id of this rank's worker in the roster, which its coins depend on."""
        return self.roster.ids[self.row]

    @property
    def watch(self) -> PeerWatch | None:
        """The watch that finds the rank that failed; None for a rank without a group."""
        return None if self.process_group is None else watch_peers(self.process_group)

    def start_watch(self) -> None:
        """Start the watch, which answers others even if only this rank raises an error."""
        if self.process_group is not None:
            watch_peers(self.process_group)


def check_member(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Check that this process is in a group, and return the group.

    Raises:
        UnsupportedTypeError: It is no group, such as a DeviceMesh.
        ProcessGroupError: It is not.
    """
    ready = dist.is_available() and dist.is_initialized()
    is_group = ready and isinstance(process_group, dist.ProcessGroup)
    # torch gives non-members a placeholder instead of a group.
    other: Any = process_group
    if ready and not is_group and other != dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedTypeError(
            f"process_group={type(process_group).__name__}: expected a process group of "
            "torch.distributed. For a DeviceMesh of one dim, give mesh.get_group()"
        )
    if not is_group or dist.get_rank(process_group) < 0:
        raise ProcessGroupError(
            "this process is not a member of process_group=; make the optimizer on members only"
        )
    return process_group


def _find_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if process_group is not None:
        return check_member(process_group)
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ProcessGroupError(
            f"WORLD_SIZE={world_size}, but there is no process group; call "
            "torch.distributed.init_process_group before DistributedLion (or unset WORLD_SIZE to "
            "train alone)"
        )
    return None
