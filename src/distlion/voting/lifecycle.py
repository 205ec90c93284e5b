"""Whether an optimizer can go on: the one place that knows if it is ready, dead or torn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from distlion.errors import CheckpointError, DistlionError, ProcessGroupError
from distlion.voting.group import VotingGroup


class Lifecycle:
    """The life of an optimizer among others.

        alive ──exchange──► alive      the exchange ended, or all workers raised the same
                        └─► dead       it was left by any other error: peers are at unknown places
        alive ──commit────► alive
                        └─► torn       an exception (Ctrl-C, no memory) cut the commit short

    Args:
        group: The workers.

    Attributes:
        is_ready: Whether its parameters have been put into buckets.
    """

    def __init__(self, group: VotingGroup) -> None:
        self._group = group
        self._process_id = os.getpid()
        self._cause_of_death: str | None = None
        self._is_torn = self.is_ready = False

    @property
    def is_dead(self) -> bool:
        """Whether an exchange has failed."""
        return self._cause_of_death is not None

    def check_usable(self) -> None:
        """Check that collectives may begin.

        Raises:
            ProcessGroupError: An exchange failed before, this is a fork of the process, or the
                group is not the one from the start.
        """
        if self._cause_of_death is not None:
            raise ProcessGroupError(
                f"this optimizer is dead: {self._cause_of_death}; restart the workers from a "
                "checkpoint"
            )
        if os.getpid() != self._process_id:
            raise ProcessGroupError(
                f"this optimizer was made in process {self._process_id} and cannot vote in its "
                f"fork {os.getpid()}; make it after the fork"
            )
        self._check_group()

    def _check_group(self) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if self._group.process_group is None:
            if ready:
                raise ProcessGroupError(
                    "a process group appeared after this optimizer was made for one worker; call "
                    "init_process_group before DistributedLion"
                )
            return
        if not ready or not self._is_registered():
            raise ProcessGroupError(
                "the process group of this optimizer was destroyed or replaced; make a new "
                "optimizer and load its state"
            )

    def _is_registered(self) -> bool:
        if self._group.is_default:
            return dist.group.WORLD is self._group.process_group
        try:
            return dist.get_rank(self._group.process_group) >= 0
        except (ValueError, RuntimeError):
            return False

    def check_whole(self) -> None:
        """Raise CheckpointError where parameters are between two steps."""
        if self._is_torn:
            raise CheckpointError(
                "an exception cut the commit of a step short, so that parameters and momenta are "
                "between two steps; restart from an earlier checkpoint"
            )

    @contextmanager
    def exchange(self, what: str) -> Iterator[None]:
        """Declare this optimizer dead if what follows is left by an error.

        Whatever interrupts an exchange leaves peers at an unknown place. Only of an error that all
        of them raise, with nothing committed, it is known that they wait at the same place.

        Raises:
            ProcessGroupError: As ``check_usable``.
        """
        self.check_usable()
        self._cause_of_death = f"{what} is under way"
        try:
            yield
        except BaseException as error:
            if isinstance(error, DistlionError) and error.is_recoverable:
                self._cause_of_death = None
            else:
                self._cause_of_death = f"{what} failed ({type(error).__name__}: {error})"
            raise
        self._cause_of_death = None

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Declare parameters torn between two steps if what follows is left by an exception."""
        self._is_torn = True
        yield
        self._is_torn = False
