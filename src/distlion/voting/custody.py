"""Whose momenta a process keeps, and how it meets those that keep the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distlion.errors import CheckpointError, UnsupportedTypeError
from distlion.signals import deferred_signals
from distlion.transport import gather_bytes

if TYPE_CHECKING:
    from distlion.voting.peers import Peers

Gather = Callable[[bytes], list[bytes]]
"""Gather records of one size from all processes, in their order."""


@dataclass(frozen=True)
class Custody:
    """What a checkpoint needs to know of an optimizer among others.

    Attributes:
        workers: Those whose momenta are kept in this process.
        n_workers: Those of all processes.
        node_size: Workers that vote as one; 1 without nodes.
        process: The number of this process.
        n_processes: Of all workers.
        is_stacked: Whether momenta have a first dim for the workers.
        seed: Of the optimizer's coins.
        meeting: Opens a call that all processes make, between two steps.
        agree: Raises on all processes what keeps one of them from the call.
        open_channel: Connects all processes apart from the votes, for this thread, or with True for
            one in the background.
    """

    workers: Sequence[int]
    n_workers: int
    node_size: int
    process: int
    n_processes: int
    is_stacked: bool
    seed: int
    meeting: Callable[[str], AbstractContextManager[object]]
    agree: Callable[[str, CheckpointError | None], None]
    open_channel: Callable[[bool], Gather]

    @classmethod
    def of_one_process(cls, workers: int, *, is_stacked: bool, seed: int) -> Custody:
        """Return that of a process which keeps the momenta of all workers."""
        return cls(
            workers=range(workers),
            n_workers=workers,
            node_size=1,
            process=0,
            n_processes=1,
            is_stacked=is_stacked,
            seed=seed,
            meeting=deferred_signals,
            agree=agree_alone,
            open_channel=lambda in_background: _gather_alone,
        )

    @property
    def n_voters(self) -> int:
        """Workers that vote; nodes, where there are some."""
        return self.n_workers // self.node_size


def agree_alone(call: str, problem: CheckpointError | None) -> None:
    """Raise what keeps the only process from a call, after which it may go on."""
    if problem is not None:
        problem.is_recoverable = True
        raise problem


def _gather_alone(record: bytes) -> list[bytes]:
    return [record]


def name_worker(peers: Peers) -> str | None:
    """Say whose momenta a state holds; None for those of all, or of one that is alone."""
    if peers.is_alone or peers.sharding is not None:
        return None
    nodes = f", in nodes of {peers.node_size}" if peers.node_size > 1 else ""
    return f"{peers.group.rank} of {peers.group.world_size}{nodes}"


def custody_among(peers: Peers, step: Callable[[], int]) -> Custody:
    """Say whose momenta a process among others keeps.

    Args:
        peers: They.
        step: Returns the step that errors name.

    Raises:
        UnsupportedTypeError: Parameters are sharded, which another format holds better.
    """
    if peers.sharding is not None:
        raise UnsupportedTypeError(
            "the parameters are DTensors: save them with torch.distributed.checkpoint, which knows "
            "their shards; get_optimizer_state_dict(model, optimizer) holds the momenta of all "
            "workers, as DTensors of the shape (workers, *shape)"
        )
    if peers.is_alone:
        return Custody.of_one_process(1, is_stacked=False, seed=peers.settings.seed)
    rank, world_size = peers.group.rank, peers.group.world_size

    def agree(call: str, problem: CheckpointError | None) -> None:
        peers.agree(call, problem, step=step())

    @contextmanager
    def meeting(call: str) -> Iterator[None]:
        peers.check_idle(call)
        with peers.lifecycle.exchange(call):
            yield

    def open_channel(in_background: bool) -> Gather:
        link = peers.network.checkpoint_link(in_background=in_background)
        return lambda record: gather_bytes(link, record, step=step())

    return Custody(
        workers=(rank,),
        n_workers=world_size,
        node_size=peers.node_size,
        process=rank,
        n_processes=world_size,
        is_stacked=False,
        seed=peers.settings.seed,
        meeting=meeting,
        agree=agree,
        open_channel=open_channel,
    )
