"""Membership: a worker's way from one epoch to the next, and what it knows of the members."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection
from contextlib import suppress

from torch.distributed import DistError

from distlion.crew.admission import ask
from distlion.crew.carried import CarriedState
from distlion.crew.changes import Changes
from distlion.crew.epoch import (
    QUICK_S,
    Epoch,
    follow,
    is_left_out,
    meet,
    read_decision,
    take_id,
)
from distlion.crew.lookout import Lookout
from distlion.crew.member import Member, describe_self
from distlion.crew.patience import Patience
from distlion.crew.rendezvous import Rendezvous
from distlion.errors import CrewError
from distlion.step.newcomers import Newcomers
from distlion.step.settings import Settings

logger = logging.getLogger("distlion")

_TURNS = "turns to sit out"


class Membership:
    """One worker's membership in a crew.

    Args:
        rendezvous: The rendezvous of the run.
        min_workers: Fewest workers that train.
        newcomers: A newcomer's first momentum.
        wait_timeout_s: Seconds that fewer than ``min_workers`` wait for others.

    Attributes:
        rendezvous, min_workers, newcomers: The arguments.
        id: The number of this worker, unique in the run.
        carried: The objects that newcomers take the state of.
        changes: The changes of members so far.
        patience: The limits of its wait for an epoch.
        ended: Event that is set once this worker has finished or left.

    Raises:
        DistError: The store is gone.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        min_workers: int,
        newcomers: Newcomers,
        wait_timeout_s: float,
    ) -> None:
        self.rendezvous, self.min_workers = rendezvous, min_workers
        self.newcomers: Newcomers = newcomers
        self.id = take_id(rendezvous.store)
        self.carried, self.changes = CarriedState(), Changes()
        self.patience = Patience(wait_timeout_s)
        self._epoch: Epoch | None = None
        self._previous: Epoch | None = None
        self._tried, self._others_until_s = set[int](), 0.0
        self._lookout = Lookout(rendezvous, self.id)
        self.ended = self._lookout.ended
        weakref.finalize(self, self.ended.set)

    @property
    def has_epoch(self) -> bool:
        """True once an epoch was formed."""
        return self._epoch is not None

    @property
    def epoch(self) -> Epoch:
        """The present epoch.

        Raises:
            CrewError: No epoch was formed yet.
        """
        if self._epoch is None:
            raise CrewError("the crew has formed no epoch yet; make its optimizer first")
        return self._epoch

    @property
    def wants_change(self) -> bool:
        """True if somebody wants to join, so that the epoch has to end.

        Raises:
            CrewError: The store is gone.
        """
        return self._lookout.wants_change

    def describe(self, *, epoch: int, step: int, calls: int, settings: int) -> Member:
        """Describe this worker as a member.

        Args:
            epoch: The last epoch that it completed.
            step: Number of steps in its parameters.
            calls: Number of its local steps; 0 where every step is a vote.
            settings: Digest of the settings that must be equal on all.
        """
        return describe_self(self.id, epoch=epoch, step=step, calls=calls, settings=settings)

    def find_next(
        self, own: Member, lost: Collection[int], *, patience_s: float = QUICK_S
    ) -> Epoch:
        """Find the next epoch: among survivors, by asking the members, or at the rendezvous.

        Args:
            own: This worker.
            lost: Ranks, in the epoch found last, of workers known to be lost.
            patience_s: Seconds within which the others follow this worker.

        Raises:
            CrewError: The store is gone, or the others train with other settings than this worker.
            TooFewError: Too few came to the rendezvous in time.
            FormingError: A worker that came to it is gone again.
        """
        before, self._previous, found = self._previous, None, None
        # Members that fail twice may reach the store but not each other, and then need others.
        is_over = self._lookout.pause() or self.patience.failures > 1
        if before is not None and not is_over:
            found = follow(
                self.rendezvous,
                before,
                own,
                {before.members[rank].id for rank in lost},
                min_workers=self.min_workers,
                until_s=patience_s + max(time.monotonic(), self._others_until_s),
            )
        if found is None:
            found, last = self._ask(own, before)
        if found is None:
            logger.info("worker %d waits for %d workers or more", self.id, self.min_workers)
            limit_s, least = self.patience.next_wait_s(), self.min_workers
            found = meet(self.rendezvous, own, min_workers=least, limit_s=limit_s, last=last)
        self._previous = found
        self._tried.add(found.number)
        self._others_until_s = time.monotonic() + QUICK_S + found.connect_timeout_s
        return found

    def _ask(self, own: Member, before: Epoch | None) -> tuple[Epoch | None, int]:
        """Ask the members to let this worker in, if others have begun an epoch without it.

        Returns:
            The epoch, and the number of the last one begun: a later one ends the wait for a round.

        Raises:
            CrewError: They train with other settings.
        """
        last = 0
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            last = self.rendezvous.find_last_begun()
            is_outside = last > own.epoch and last not in self._tried
            if is_outside or (before is not None and is_left_out(before, own)):
                # With an unreachable member, the others would try to form epochs forever.
                self.ended.wait(self.patience.find_pause_s())
                logger.info("worker %d asks the members to let it in", self.id)
                decision = ask(self.rendezvous.store, own)
                if decision is not None:
                    return read_decision(self.rendezvous, decision, own), last
        return None, last

    def enter(self, epoch: Epoch, *, seconds: float, settings: Settings) -> None:
        """Note that an epoch was formed, and log the members that left or came, with reasons.

        Args:
            epoch: The epoch.
            seconds: Seconds that it took.
            settings: The optimizer's settings, with the limits of operations on process groups.
        """
        self.changes.note_epoch(epoch, seconds=seconds)
        self._epoch, self._others_until_s = epoch, 0.0
        self.patience.rest()
        self._tried.clear()
        self._lookout.watch(
            epoch,
            longest_operation_s=settings.timeouts.group_s,
            users_operation_s=settings.timeouts.connect_s,
        )
        if epoch.place == 0:
            with suppress(DistError):  # a store that is gone is noticed where it is needed
                self.rendezvous.note_begun(epoch.number)
            self.rendezvous.publish(epoch.describe())

    def sit_out(self, epoch: Epoch) -> None:
        """Let the others form an epoch without this worker, in case it is the obstacle.

        Workers that reach the store but not each other would try to form an epoch forever. From the
        second failure on, one of them stays away for a while, longer each time. Nobody knows which
        worker is unreachable, so they take turns, which the store counts.
        """
        ids, store = sorted(member.id for member in epoch.members), self.rendezvous.store
        self.patience.failures += 1
        seconds = self.patience.find_pause_s()
        if not seconds or len(ids) <= self.min_workers:
            return
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            turn = store.add(_TURNS, 0)
            if ids[-1 - turn % len(ids)] == self.id:
                logger.warning("worker %d lets others form an epoch for %g s", self.id, seconds)
                self.rendezvous.leave()
                self.ended.wait(seconds)
                store.add(_TURNS, 1)
