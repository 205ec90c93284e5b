"""Membership: a worker's way from one epoch to the next, and the decisions on it.

    all ask ──► epoch 1 ──one is lost──► epoch 2 ──one asks──► epoch 3 ──too few──► all ask

If a member is lost, the others have agreed on which (``PeerWatch``). If a worker asks to be let in,
all have left the epoch at the same step, and met. So the remaining members decide on the next epoch
among themselves, in milliseconds, and again if it could not be formed. If they are too few, they
ask, as workers from outside do. Where nobody trains, the workers that ask decide.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import DistError

from distlion.crew.admission import Ask, answer, ask, find_doubles, list_ready, refuse
from distlion.crew.carried import CarriedState
from distlion.crew.changes import Changes
from distlion.crew.epoch import (
    QUICK_S,
    Epoch,
    FormingError,
    Member,
    TooFewError,
    order_members,
)
from distlion.crew.lanes import Lanes, OneLane
from distlion.crew.lookout import Lookout
from distlion.crew.memory import BEGUN, EPOCHS, read_begun
from distlion.crew.store import Rendezvous, name_epoch
from distlion.errors import CrewError
from distlion.step.newcomers import Newcomers
from distlion.step.settings import Settings

logger = logging.getLogger("distlion")

_POLL_S = 0.005
_DECISION = "decision"
_LONGEST_PAUSE_S = 60.0
# Longer than the others need to form an epoch.
_PAUSE_S = 10.0


class Patience:
    """The patience of a worker without an epoch.

    Args:
        limit_s: Seconds until it gives up.

    Attributes:
        failures: Number of epochs in a row that failed to form with it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.rest()

    def rest(self) -> None:
        """Note that an epoch was formed."""
        self.failures = 0
        self._since_s: float | None = None

    def find_left_s(self) -> float:
        """Return the time until this worker gives up; it begins with the first call."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        return self._since_s + self._limit_s - now_s

    def find_pause_s(self) -> float:
        """Return the time to leave the others alone: 0 after one failure, then longer each time.

        At least half of the time left remains for new attempts.
        """
        if self.failures < 2:
            return 0.0
        wanted_s: float = min(_PAUSE_S * 2 ** (self.failures - 2), _LONGEST_PAUSE_S)
        return max(0.0, min(wanted_s, self.find_left_s() / 2))

    def check(self, error: Exception) -> None:
        """Allow another attempt after an epoch was not formed, as long as there is time.

        Args:
            error: The reason why it was not formed.

        Raises:
            CrewError: No time is left.
        """
        if self.find_left_s() > 0:
            return
        if isinstance(error, TooFewError):
            raise CrewError(
                f"{error} within {self._limit_s:g} s; start more of them, and resume from a "
                "checkpoint"
            ) from error
        raise CrewError(
            f"workers came to the store and not to each other for {self._limit_s:g} s ({error}); "
            "can they connect at any port? GLOO_SOCKET_IFNAME names the interface"
        ) from error


_TURNS = "turns to sit out"


class Membership:
    """One worker's membership in a crew.

    Args:
        rendezvous: The rendezvous of the run.
        min_workers: Fewest workers that train.
        newcomers: A newcomer's first momentum.
        wait_timeout_s: Seconds that fewer than ``min_workers`` wait for others.
        silence_s: Seconds without a heartbeat after which a member is given up.
        lanes: The processes of this member; None for this one alone.

    Attributes:
        rendezvous, min_workers, newcomers, silence_s: The arguments.
        lanes: The processes of this member, one or several.
        id: The number of this worker, unique in the run.
        carried: The objects that newcomers take the state of.
        changes: The changes of members so far.
        patience: The limits of its wait for an epoch.
        step_s: Seconds that a step may take, by the settings of the optimizer.
        lookout: The thread that finds workers that want to join.
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
        silence_s: float,
        lanes: Lanes | None = None,
    ) -> None:
        self.rendezvous, self.min_workers = rendezvous, min_workers
        self.silence_s = silence_s
        self.newcomers: Newcomers = newcomers
        self.lanes = lanes or OneLane()
        rendezvous.await_members()
        self.id = self.lanes.begin(rendezvous, silence_s=silence_s)
        self.carried, self.changes = CarriedState(), Changes()
        self.patience = Patience(wait_timeout_s if self.lanes.leads else math.inf)
        self._epoch: Epoch | None = None
        self._previous: Epoch | None = None
        self._others_until_s = self.step_s = 0.0
        self._has_fallen_behind = False
        self._known_begun = {0}
        self.lookout = Lookout(rendezvous, self.id, self.lanes)
        self.ended = self.lookout.ended
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

    def check_here(self) -> None:
        """Check that this worker has not left.

        Raises:
            CrewError: It has.
        """
        if self.ended.is_set():
            raise CrewError(
                "this worker has left its crew; take steps inside `with crew:`, or begin again "
                "with another Crew"
            )

    def describe(self, *, epoch: int, step: int, calls: int, settings: int) -> Member:
        """Describe this worker as a member.

        Args:
            epoch: The last epoch that it completed.
            step: Number of steps in its parameters.
            calls: Number of its local steps; 0 where every step is a vote.
            settings: Digest of the settings that must be equal on all.
        """
        host, pid, lanes = os.uname().nodename, os.getpid(), self.lanes
        has_group = isinstance(lanes, Lanes)
        return Member(self.id, epoch, step, settings, host, pid, calls, lanes.number, has_group)

    def note_if_left_behind(self) -> None:
        """Note whether others have begun a later epoch; then this worker gives nobody parameters.

        Raises:
            DistError: The store is away.
        """
        before = self._previous
        if before is not None and self.rendezvous.find_last_begun() > before.number:
            self.lookout.stop_giving()
            self._previous, self._has_fallen_behind = None, True

    @property
    def has_to_catch_up(self) -> bool:
        """True if the members' parameters are not this worker's: it is new, or was left behind.

        Workers that are all new and tried to begin a run together have nobody to catch up with.
        """
        before = self._previous
        begins = before is not None and not any(member.epoch for member in before.members)
        return self._has_fallen_behind or not (self.has_epoch or begins)

    def find_next(
        self,
        own: Member,
        lost: Collection[int],
        *,
        patience_s: float = QUICK_S,
        is_ready: Callable[[bool], bool] = lambda _: True,
    ) -> Epoch:
        """Find the next epoch: among survivors, or by asking to be let in.

        Args:
            own: This worker.
            lost: Places, in the epoch found last, of workers known to be lost.
            patience_s: Seconds within which the others follow this worker.
            is_ready: Function that returns whether this worker may be let in now (``ask``).

        Raises:
            CrewError: The others train with other settings than this worker.
            DistError: The store is away.
            TooFewError: Nobody trains, and too few came in time.
        """
        found = self.lanes.find(
            own,
            lambda: self._find_next(own, lost, patience_s=patience_s, is_ready=is_ready),
            read=lambda decision: read_decision(self.rendezvous, decision, own),
            check=self.patience.check,
        )
        return replace(found, lane=self.lanes.lane) if self.lanes.lane else found

    def _find_next(
        self,
        own: Member,
        lost: Collection[int],
        *,
        patience_s: float,
        is_ready: Callable[[bool], bool],
    ) -> Epoch:
        before, self._previous, found = self._previous, None, None
        self.lookout.is_outside = False
        # Members that fail twice may reach the store but not each other, and then need others.
        is_over = self.lookout.pause() or self.patience.failures > 1
        if before is not None and not is_over:
            now_s = time.monotonic() + self.rendezvous.find_grace_s()
            try:
                found = follow(
                    self.rendezvous,
                    before,
                    own,
                    {before.members[rank].id for rank in lost},
                    min_workers=self.min_workers,
                    until_s=patience_s + max(now_s, self._others_until_s),
                )
            except DistError:  # the store is away: all follow once more in the next one
                self._previous = before
                raise
        if found is None:
            found = self._ask(own, is_ready)
        self._claim(found)
        self._previous = found
        self._others_until_s = time.monotonic() + QUICK_S + found.connect_timeout_s
        return found

    def _claim(self, epoch: Epoch) -> None:
        """Let no second run begin beside one that has begun since the members of an epoch asked.

        Workers that are all new begin a run. Where messages are slow or workers die, two groups of
        them may be about to.

        Raises:
            FormingError: Others were first; this worker has to join them.
            DistError: The store is away.
        """
        if any(member.epoch for member in epoch.members):
            return
        store, number = self.rendezvous.store, epoch.number
        while (found := read_begun(store)) != number:
            if found and found not in self._known_begun:
                self._previous, self._has_fallen_behind = None, True
                raise FormingError(f"other workers have begun the run, with epoch {found}")
            store.compare_set(BEGUN, str(found) if found else "", str(number))
        self._known_begun.add(number)
        self.rendezvous.memory.claimed.add(number)

    def _ask(self, own: Member, is_ready: Callable[[bool], bool]) -> Epoch:
        """Ask the members to let this worker in; where nobody trains, begin with others that ask.

        Raises:
            CrewError: They train with other settings.
            DistError: The store is away.
            TooFewError: Too few came in time.
        """
        rendezvous, least = self.rendezvous, self.min_workers
        try:
            if not own.epoch:
                rendezvous.await_members()  # in the next store, too
            # Its members are gone, or workers would not begin anew from here.
            self._known_begun.add(begun := rendezvous.find_last_begun())
            if begun > own.epoch:
                # With an unreachable member, the others would try to form epochs forever.
                self.ended.wait(self.patience.find_pause_s())
            logger.info("worker %d asks to be let in, or waits for %d workers", self.id, least)
            self.lookout.is_outside = True
            decision = ask(
                rendezvous,
                own,
                min_workers=least,
                limit_s=self.patience.find_left_s(),
                decide=partial(decide_among, rendezvous, min_workers=least),
                is_ready=is_ready,
            )
            found = take_decision(rendezvous, decision, own)
        except (CrewError, DistError):
            raise
        except RuntimeError as error:
            raise rendezvous.make_gone_error(error) from error
        finally:
            self.lookout.is_outside = False
        assert found is not None  # only workers in it are answered
        return found

    def endure(self, error: Exception) -> bool:
        """Allow another attempt after an epoch was not formed; wait for a store that is away.

        Args:
            error: The reason why it was not formed.

        Returns:
            Whether the store was away, which is nobody's fault.

        Raises:
            CrewError: No time is left, or the store stays away.
        """
        was_away = self.rendezvous.await_back(error)
        if was_away:
            self.patience.rest()
        self.patience.check(error)
        return was_away

    def enter(self, epoch: Epoch, *, seconds: float, settings: Settings) -> None:
        """Note that an epoch was formed, and log the members that left or came, with reasons.

        Args:
            epoch: The epoch.
            seconds: Seconds that it took.
            settings: The optimizer's settings, with the limits of operations on process groups.
        """
        self.changes.note_epoch(epoch, seconds=seconds)
        self._epoch, self._others_until_s, self._has_fallen_behind = epoch, 0.0, False
        self.step_s = settings.timeouts.step_s
        self.rendezvous.note_entered()
        self.rendezvous.memory.note_begun(epoch.number)
        self.rendezvous.memory.now = epoch.describe()
        self.patience.rest()
        self.lookout.watch(
            epoch,
            longest_operation_s=settings.timeouts.group_s,
            users_operation_s=settings.timeouts.connect_s,
        )
        if epoch.rank == 0:
            with suppress(DistError):  # a store that is gone is noticed where it is needed
                self.rendezvous.note_begun(epoch.number)
            self.rendezvous.publish(self.rendezvous.memory.now)

    def sit_out(self, epoch: Epoch) -> None:
        """Let the others form an epoch without this worker, in case it is the obstacle.

        Workers that reach the store but not each other would try to form an epoch forever. From the
        second failure on, one of them stays away for a while, longer each time. Nobody knows which
        worker is unreachable, so they take turns, which the store counts.
        """
        if not self.lanes.leads:
            return
        ids, store = sorted(member.id for member in epoch.members), self.rendezvous.store
        self.patience.failures += 1
        seconds = self.patience.find_pause_s()
        if not seconds or len(ids) <= self.min_workers:
            return
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            turn = store.add(_TURNS, 0)
            if ids[-1 - turn % len(ids)] == self.id:
                logger.warning("worker %d lets others form an epoch for %g s", self.id, seconds)
                self.ended.wait(seconds)
                store.add(_TURNS, 1)


def decide_among(rendezvous: Rendezvous, asks: Sequence[Ask], *, min_workers: int) -> None:
    """Decide on an epoch of workers that ask, where nobody trains, and answer them.

    The most advanced worker's parameters and settings count. Before the first epoch all are taken,
    and the handshake reports differences. Workers that have missed an epoch, or are new, do not
    begin while others that have trained live.

    Args:
        rendezvous: The rendezvous.
        asks: The workers that are there.
        min_workers: Fewest workers that train.
    """
    asks = sorted(asks, key=lambda each: each.member.progress, reverse=True)
    first, doubles = asks[0].member, find_doubles(asks, [])
    alike = [
        each
        for each in asks
        if each.member.kind == first.kind
        and (not first.epoch or each.member.settings == first.settings)
        and each not in doubles
    ]
    if len(alike) >= min_workers and not rendezvous.has_signs:
        rendezvous.name_crew()  # before the look for others, who may be back by now
    has_missed_some = not first.epoch or first.epoch < rendezvous.find_last_begun()
    if has_missed_some and rendezvous.is_somebody_alive():
        return
    refuse(rendezvous.store, [each for each in asks if each not in alike], first, doubles)
    if len(alike) >= min_workers:
        chosen = alike[: rendezvous.count_places(0)]
        members = [each.member.describe() for each in chosen]
        answer(rendezvous.store, chosen, _make_decision(rendezvous, members, []))


def _make_decision(
    rendezvous: Rendezvous, members: list[dict[str, Any]], guests: list[int]
) -> dict[str, Any]:
    crew, number = rendezvous.name_crew(), rendezvous.store.add(EPOCHS, 1)
    return {"crew": crew, "epoch": number, "members": members, "guests": guests}


def follow(
    rendezvous: Rendezvous,
    before: Epoch,
    own: Member,
    lost: Collection[int],
    *,
    min_workers: int,
    until_s: float,
) -> Epoch | None:
    """Form the next epoch from the remaining members and the workers that ask to join.

    The first worker to see all members decides. After a timeout the first one decides with those
    present. Each epoch has only one successor, whoever decides. A member that comes too late asks
    to be let in, which costs the others little. So do newcomers and members that have missed an
    epoch, where nobody else has come.

    Args:
        rendezvous: The rendezvous; its store keeps the decision.
        before: The epoch that is over, or could not be formed.
        own: This worker, as it is now.
        lost: Ids of workers known to be lost.
        min_workers: Fewest workers that train.
        until_s: End of the wait, by the monotonic clock.

    Returns:
        The epoch; None if too few are there, or others have decided without this worker.

    Raises:
        DistError: The store is away. It may come back empty, so all survivors follow anew.
    """
    left = [member.id for member in before.members if member.id not in lost]
    if own.id not in left or len(left) < min_workers:
        return None
    store, keys = before.store, [f"next/{each}" for each in left]
    try:
        store.set(f"next/{own.id}", json.dumps(own.describe()))
        while not store.check(keys) and not store.check([_DECISION]):
            if time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        there = [store.read(key, json.loads) for key in keys if store.check([key])]
        # Without the most advanced, who may form another epoch, others would undo their steps.
        may_decide = any(each["epoch"] >= before.members[0].epoch for each in there)
        if not store.check([_DECISION]) and len(there) >= min_workers and may_decide:
            _decide(rendezvous, before, there)
        if not store.check([_DECISION]):
            store.delete_key(f"next/{own.id}")  # later ones must not count on this worker
            if not store.check([_DECISION]):
                return None
        decision = store.read(_DECISION, json.loads)
    except CrewError:
        raise
    except RuntimeError:
        if rendezvous.is_away:
            raise
        return None
    return take_decision(rendezvous, decision, own)


def _decide(rendezvous: Rendezvous, before: Epoch, records: list[dict[str, Any]]) -> None:
    """Decide on the next epoch, unless it is decided; tell the workers that asked that they are in.

    Args:
        rendezvous: The rendezvous; its store holds the asks.
        before: The epoch that is over.
        records: The record of each worker that is there.
    """
    settings = before.members[before.place].settings
    ready = [
        each
        for each in list_ready(rendezvous.store, settings, before.members)
        if each.member.donor is None or each.member.donor in _find_most_advanced(records)
    ]
    asks = ready[: rendezvous.count_places(len(records))]
    members = [*records, *(each.member.describe() for each in asks)]
    guests = [each.member.id for each in asks]
    decision = _make_decision(rendezvous, members, guests)
    proposal = json.dumps(decision)
    if before.store.compare_set(_DECISION, "", proposal) == proposal:
        answer(rendezvous.store, asks, decision)


def _find_most_advanced(records: list[dict[str, Any]]) -> list[int]:
    """Find the ids of the members with the most progress."""
    members = [Member(**each) for each in records]
    best = max(member.progress for member in members)
    return [member.id for member in members if member.progress == best]


def take_decision(rendezvous: Rendezvous, decision: Mapping[str, Any], own: Member) -> Epoch | None:
    """Make the epoch of a decision, and note it for a store that comes back."""
    found = read_decision(rendezvous, decision, own)
    if found is not None:
        rendezvous.memory.note_decision(decision)
    return found


def read_decision(rendezvous: Rendezvous, decision: Mapping[str, Any], own: Member) -> Epoch | None:
    """Make the epoch of a decision; return None if this worker is not in it."""
    members = order_members([Member(**record) for record in decision["members"]])
    ids = [member.id for member in members]
    if own.id not in ids:
        return None
    number, guests = decision["epoch"], decision["guests"]
    ranks = tuple(rank for rank, each in enumerate(ids) if each in guests)
    store = rendezvous.store.at(name_epoch(number))
    return Epoch(number, tuple(members), ids.index(own.id), store, ranks)
