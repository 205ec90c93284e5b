"""Momentum ownership: the workers whose momenta a process keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from distlion.errors import CheckpointError, ProcessGroupError, StepError, UnsupportedTypeError
from distlion.peers.meetings import agree_alone
from distlion.peers.session import Session
from distlion.signals import deferred_signals
from distlion.wire.ask import ask

Gather = Callable[[bytes], list[bytes]]
"""Function that gathers a record from each process, in their order."""


@dataclass(frozen=True)
class MomentumOwnership:
    """The momenta that a process keeps, and the calls that checkpoints make with all processes.

    Attributes:
        workers: The workers whose momenta are kept in this process.
        n_workers: Number of workers of all processes.
        node_size: Workers that vote as one; 1 without nodes.
        process: The number of this process.
        n_processes: Number of processes of all workers.
        is_stacked: Whether momenta have a first dim for the workers.
        seed: Seed of the optimizer's coins.
        meeting: Function that opens a call that all processes make between two steps.
        agree: Function that raises on all processes if one of them cannot make the call, or says
            another line.
        open_channel: Function that connects all processes apart from the votes, for this thread, or
            with True for one in the background.
    """

    workers: Sequence[int]
    n_workers: int
    node_size: int
    process: int
    n_processes: int
    is_stacked: bool
    seed: int
    meeting: Callable[[str], AbstractContextManager[object]]
    agree: Callable[..., None]
    open_channel: Callable[[bool], Gather]

    @classmethod
    def of_one_process(cls, workers: int, *, is_stacked: bool, seed: int) -> MomentumOwnership:
        """Return the ownership of a process that keeps the momenta of all workers."""
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
        """Number of workers that vote, or of nodes, if there are any."""
        return self.n_workers // self.node_size


def _gather_alone(record: bytes) -> list[bytes]:
    return [record]


def name_worker(session: Session) -> str | None:
    """Name the worker whose momenta a state holds; None for all workers, or for one alone."""
    ranks, size = session.ranks, session.ranks.node_size
    if ranks.is_alone or session.sharding is not None:
        return None
    nodes = f", in nodes of {size}" if size > 1 else ""
    return f"{ranks.rank} of {ranks.n_ranks}{nodes}"


def find_ownership(session: Session, step: Callable[[], int]) -> MomentumOwnership:
    """Return the ownership of the momenta that this process keeps.

    Args:
        session: The optimizer's session.
        step: Function that returns the step that errors name.

    Raises:
        UnsupportedTypeError: Parameters are sharded, for which another format is better.
    """
    ranks, seed = session.ranks, session.settings.seed
    if session.sharding is not None:
        raise UnsupportedTypeError(
            "the parameters are DTensors: save them with torch.distributed.checkpoint, which knows "
            "their shards; get_optimizer_state_dict(model, optimizer) holds the state of all "
            "workers, as DTensors of the shape (workers, *shape) where workers differ"
        )
    if ranks.is_alone:
        return MomentumOwnership.of_one_process(1, is_stacked=False, seed=seed)

    def agree(call: str, problem: CheckpointError | None, said: str = "") -> None:
        session.meetings.agree(call, problem, step=step(), said=said)

    @contextmanager
    def meeting(call: str) -> Iterator[None]:
        session.check_idle(call)
        with session.lifecycle.collective(call):
            yield

    def open_channel(in_background: bool) -> Gather:
        if not session.connections.has_checkpoints:
            _connect(session, agree)
        connections, now = session.connections, step()
        link = connections.link_checkpoints(in_background=in_background)
        if not in_background:
            return lambda record: ask(link, record, step=step())

        def gather(record: bytes) -> list[bytes]:
            try:
                return ask(link, record, step=now)  # the count of steps is the other thread's
            except StepError:
                connections.lost_checkpoints = True
                raise

        return gather

    return MomentumOwnership(
        workers=(ranks.rank,),
        n_workers=ranks.n_ranks,
        node_size=session.ranks.node_size,
        process=ranks.rank,
        n_processes=ranks.n_ranks,
        is_stacked=False,
        seed=seed,
        meeting=meeting,
        agree=agree,
        open_channel=open_channel,
    )


def _connect(session: Session, agree: Callable[[str, CheckpointError | None], None]) -> None:
    """Connect all processes for checkpoints, or none: only this call fails, and steps go on."""
    problem: CheckpointError | None = None
    try:
        session.connections.connect_for_checkpoints()
    except ProcessGroupError as error:
        problem = CheckpointError(f"the connections for checkpoints were not made: {error}")
    try:
        agree("the connections for checkpoints", problem)
    except CheckpointError:
        session.connections.disconnect_for_checkpoints()
        raise
