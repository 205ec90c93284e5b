"""The life of an optimizer: the only place that knows if it is ready, dead or torn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from distlion.errors import (
    CheckpointError,
    ConcurrentCallError,
    DeviceError,
    DistlionError,
    PeerLostError,
    ProcessGroupError,
    StepTimeoutError,
)
from distlion.signals import Deferral, deferred_signals
from distlion.step.ranks import Ranks
from distlion.wire.turns import Turn
from distlion.wire.watch import is_registered


class Lifecycle:
    """The life of an optimizer among others.

        alive ──collective► alive      the collective ended, or all workers raised the same
                        └─► dead       it was left by any other error: peers are at unknown places;
                                       or a signal's exception came meanwhile, and ends this worker;
                                       a member of a crew is dead until the next epoch
        alive ──commit────► alive
                        └─► torn       an exception (Ctrl-C twice, no memory) cut the commit short

    Args:
        ranks: All ranks of the optimizer.

    Attributes:
        is_ready: Whether its parameters have been put into buckets.
        is_torn: Whether a commit has begun and not ended: parameters are between two steps.
        death: The error that left a member of a crew dead until the next epoch; else None.
        number: Number of the optimizer among all on its process group.
        afterwards: Calls to make once the exchange under way has ended well. A warning that is made
            an error then ends nothing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._watch = ranks.watch
        self.number = 0 if self._watch is None else self._watch.turns.n_optimizers
        self._under_way: str | None = None
        self._process_id = os.getpid()
        self._cause_of_death: str | None = None
        self.death: BaseException | None = None
        self.is_torn = self.is_ready = False
        self.afterwards: list[Callable[[], None]] = []

    @property
    def is_dead(self) -> bool:
        """True if an exchange has failed."""
        return self._cause_of_death is not None

    def check_usable(self, what: str = "this call") -> None:
        """Check that collectives may begin.

        Args:
            what: The call that is to make them, for errors.

        Raises:
            PeerLostError: An exchange of this member of a crew failed before.
            ProcessGroupError: An exchange failed before, this is a fork of the process, or the
                group is not the original one.
            ConcurrentCallError: A call is under way, on another thread or further up the stack.
        """
        if self._under_way is not None:
            raise ConcurrentCallError(
                f"{self._under_way} of this optimizer is under way, on another thread or further "
                "up the stack; make one call at a time"
            )
        if self._cause_of_death is not None:
            raise self._make_dead_error(what)
        if os.getpid() != self._process_id:
            raise ProcessGroupError(
                f"this optimizer was made in process {self._process_id} and cannot vote in its "
                f"fork {os.getpid()}; make it after the fork"
            )
        if self._watch is not None and self._watch.turns.failure is not None:
            raise ProcessGroupError(
                "the process group is unusable, because an optimizer on it failed "
                f"({self._watch.turns.failure}); restart the workers from a checkpoint"
            )
        self._check_group()

    def _make_dead_error(self, what: str) -> DistlionError:
        """Make the error of a call after an exchange has failed; members of a crew may go on."""
        if self._ranks.are_members:
            return PeerLostError(
                f"[rank {self._ranks.rank}] {what} was not made, because members are lost: "
                f"{self._cause_of_death}. The next step() forms an epoch without them (with local "
                "steps, the next vote does). Make the call again after it",
                rank=self._ranks.rank,
                culprits=getattr(self.death, "culprits", ()),
            )
        return ProcessGroupError(
            f"this optimizer is dead: {self._cause_of_death}; restart the workers from a checkpoint"
        )

    def _check_group(self) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if self._ranks.process_group is None:
            if ready and not self._ranks.has_own_groups:
                raise ProcessGroupError(
                    "a process group appeared after this optimizer was made for one worker; call "
                    "init_process_group before DistributedLion"
                )
            return
        if not ready or not is_registered(self._ranks.process_group):
            raise ProcessGroupError(
                "the process group of this optimizer was destroyed or replaced; make a new "
                "optimizer and load its state"
            )

    def check_whole(self) -> None:
        """Raise CheckpointError if parameters are between two steps."""
        if self.is_torn:
            raise CheckpointError(
                "an exception cut the commit of a step short, so that parameters and momenta are "
                "between two steps; restart from an earlier checkpoint"
            )

    @contextmanager
    def collective(self, what: str, *, votes: bool = False) -> Iterator[None]:
        """Declare this optimizer dead if the block ends with an error.

        An interrupted exchange leaves peers at an unknown place. Only after an error that all of
        them raise, with nothing committed, are they known to wait at the same place. So a signal's
        exception waits for the end, except at construction, which has nothing to commit. The others
        are told that this worker leaves: after the exchange, or during it by an error of its own.

        Args:
            what: The call, for errors.
            votes: Whether it begins with votes, and not with a question to all ranks.

        Raises:
            PeerLostError, ProcessGroupError, ConcurrentCallError: As ``check_usable``. A member of
                a crew that cannot connect with the others raises PeerLostError too.
        """
        self.check_usable(what)
        self.afterwards.clear()
        with deferred_signals(what) if self.is_ready else nullcontext(Deferral(what)) as signals:
            self._under_way = what
            if self._watch is not None:
                turns = self._watch.turns
                turns.now = Turn(turns.now.number + 1, self.number, what, votes)
            try:
                yield
            except BaseException as error:
                if isinstance(error, PeerLostError | StepTimeoutError) and what.endswith("()"):
                    # Ranks that never made the call look like ranks that are gone.
                    error.args = (f"{error}. {what} must be called by every rank",)
                if not (isinstance(error, DistlionError) and error.is_recoverable):
                    self._die(f"{what} failed ({name_error(error)})", error)
                if isinstance(error, ProcessGroupError) and self._ranks.are_members:
                    raise self._make_dead_error(what) from error
                raise
            finally:
                self._under_way = None
                if signals.error is not None and not self._ranks.is_alone:
                    cause = f"{name_error(signals.error)} came during {what}"
                    self._die(cause, signals.error, has_completed=True)
        # Not kept: they hold the session, whose connections close with the optimizer.
        calls, self.afterwards = self.afterwards, []
        for call in calls:
            call()

    def _die(self, cause: str, error: BaseException, *, has_completed: bool = False) -> None:
        """Note why this optimizer is dead, and tell the others if only this worker knows.

        Args:
            cause: The cause of death.
            error: The error that ended it.
            has_completed: Whether this worker did its part of the exchange.
        """
        self._cause_of_death = self._cause_of_death or cause
        if self._ranks.are_members:  # elsewhere it would hold on to the caller's frames for good
            self.death = self.death or error
        if self._watch is None or self._ranks.is_alone:
            return
        # distlion's errors are raised or noticed by all workers; a device fails on one of them.
        is_own = not isinstance(error, DistlionError) or isinstance(error, DeviceError)
        if is_own and not self._watch.has_settled:
            self._watch.leave(self._watch.turns.now.number + has_completed, cause)
        if is_own or self._watch.has_settled:
            self._watch.turns.failure = name_error(error)


def name_error(error: BaseException) -> str:
    """Name an error by its class and, if it has one, its message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
