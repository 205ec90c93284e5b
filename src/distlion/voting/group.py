"""Which process group votes."""

from __future__ import annotations

import os

import torch.distributed as dist

from distlion.errors import ProcessGroupError
from distlion.exchange import MAX_WORKERS
from distlion.transport import PeerWatch, watch_peers


class VotingGroup:
    """The workers that vote, as they were when the optimizer was made.

    Args:
        process_group: The group; None for the default one, or for a single worker where there is
            none.

    Raises:
        ProcessGroupError: Without a group although WORLD_SIZE promises one, or this process is not
            in it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = _find_group(process_group)
        self.rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
        self.world_size = (
            1 if self.process_group is None else dist.get_world_size(self.process_group)
        )
        if self.world_size > MAX_WORKERS:
            raise ProcessGroupError(
                f"{self.world_size} workers vote; expected {MAX_WORKERS} at most"
            )

    @property
    def watch(self) -> PeerWatch:
        """What finds out who failed."""
        assert self.process_group is not None
        return watch_peers(self.process_group)


def check_member(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group, if this process is in it.

    Raises:
        ProcessGroupError: It is not.
    """
    ready = dist.is_available() and dist.is_initialized()
    # torch hands non-members a placeholder instead of a group.
    is_member = isinstance(process_group, dist.ProcessGroup)
    if not ready or not is_member or dist.get_rank(process_group) < 0:
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
