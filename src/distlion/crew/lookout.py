"""The lookout: finds workers that want to join, and shows that somebody trains."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from torch.distributed import DistError

from distlion.crew.admission import ORPHAN, find_doubles, list_asks, refuse, withdraw
from distlion.crew.donor import Donor
from distlion.crew.epoch import Epoch
from distlion.crew.lanes import OneLane
from distlion.crew.offers import Announcements
from distlion.crew.store import Rendezvous
from distlion.errors import CrewError
from distlion.wire.background import run_in_background
from distlion.wire.gloo import let_go_of_failed

LOOK_S = 0.25
"""Seconds between two looks into the store."""
_GONE_S = 10.0
"""Seconds of silence after which a worker that asks counts as gone."""
_LATE_S, _LATE_POLL_S = 0.2, 0.02
"""Seconds for a worker that asks just before a vote to show that it is there, and between looks."""


class Lookout:
    """A thread that looks into the store at intervals during an epoch.

    Args:
        rendezvous: The rendezvous, for its store.
        identity: The number of this worker.
        lanes: The processes of its member. The first speaks for it, and lets others in; it falls
            silent once another one is lost, as such a member would keep away those that ask.

    Attributes:
        ended: Event that ends the thread.
        is_outside: True while this worker asks to be let in, or after it has formed no epoch. Then
            it gives no sign that somebody trains.
        donor: What workers that announce themselves are answered by; None for nothing.
    """

    def __init__(self, rendezvous: Rendezvous, identity: int, lanes: OneLane) -> None:
        self._rendezvous, self._id, self._lanes = rendezvous, identity, lanes
        self._epoch: Epoch | None = None
        self._longest_operation_s, self._users_operation_s = 0.0, 0.0
        self._n_looks = 0
        self._changing, self._looking = threading.Lock(), threading.Lock()
        self._trouble: CrewError | None = None
        self._is_asked = self._is_left_behind = False
        self.is_outside = False
        self._heard: dict[int, tuple[str, float]] = {}
        self._has_trained = False
        self.donor: Donor | None = None
        self._announcements = Announcements()
        self.ended = threading.Event()
        run_in_background(self._look_again, self.ended, "distlion crew")

    @property
    def wants_change(self) -> bool:
        """True if the epoch must end: a worker wants to join, or others train without this one.

        Raises:
            CrewError: The store is gone.
        """
        return self.is_left_behind or self._is_asked

    @property
    def is_left_behind(self) -> bool:
        """True if others train in a later epoch, without this worker.

        Raises:
            CrewError: The store is gone.
        """
        if self._trouble is not None:
            raise self._trouble
        return self._is_left_behind

    def watch(self, epoch: Epoch, *, longest_operation_s: float, users_operation_s: float) -> None:
        """Begin to look, on behalf of this epoch's members.

        Args:
            epoch: The epoch that was just formed.
            longest_operation_s: Seconds that connections of an earlier epoch may still be in use.
            users_operation_s: The same for operations that are not distlion's.
        """
        with self._changing:
            self._epoch, self._longest_operation_s = epoch, longest_operation_s
            self._users_operation_s = users_operation_s
            self._has_trained = True
            self._is_asked = self._is_left_behind = False

    def pause(self) -> bool:
        """Stop letting workers in, as this worker has left its epoch.

        Returns:
            Whether others had begun an epoch without this worker.
        """
        with self._changing:
            was_left_behind = self._is_left_behind
            self._epoch, self._is_left_behind = None, False
        return was_left_behind

    def stop_giving(self) -> None:
        """Pause, and give nobody this worker's parameters: they are not the members'."""
        self.pause()
        with self._looking:
            if self.donor is not None:
                self.donor.stop()

    def look_closely(self) -> None:
        """Look for a worker that asks just now, before a vote that is the last one for long."""
        epoch, until_s = self._epoch, time.monotonic() + _LATE_S
        if epoch is None or self._rendezvous.count_places(len(epoch.members)) <= 0:
            return
        self._n_looks += 1
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            while not self.wants_change and list_asks(self._rendezvous.store):
                self._look(epoch)
                if time.monotonic() > until_s:
                    return
                time.sleep(_LATE_POLL_S)

    def _look_again(self) -> None:
        while not self.ended.wait(LOOK_S):
            if self._lanes.leads:
                self._trouble = self._trouble or self._rendezvous.trouble
            if not self._rendezvous.pulse.is_led:  # it would keep away workers that ask
                continue
            epoch = self._epoch
            self._n_looks += 1
            with suppress(DistError):  # a store that is gone is noticed where it is needed
                if not self._lanes.are_whole():
                    continue
                if self._has_trained and self._lanes.leads and not self.is_outside:
                    self._rendezvous.say_alive(f"{self._id} {self._n_looks}")
            if epoch is not None:
                self._look(epoch)

    def _look(self, epoch: Epoch) -> None:
        is_left_behind = is_asked = False
        try:
            if self._lanes.leads:
                is_left_behind = self._rendezvous.find_last_begun() > epoch.number
                if not is_left_behind:  # who is speaks for nobody that trains
                    with self._looking:
                        is_asked = self._look_for_asks(epoch)
                        self._answer_announcements(epoch)
        except CrewError as error:  # a stranger writes to the store
            self._trouble = error
            return
        except DistError:  # nobody asks while the store is away; it may come back empty
            self._heard, self._announcements = {}, Announcements()
            return
        except Exception as error:  # noqa: BLE001 it must not end this thread without a word
            self._trouble = self._rendezvous.make_gone_error(error)
            return
        with self._changing:
            if self._epoch is epoch:
                self._is_left_behind |= is_left_behind
                self._is_asked |= is_asked
                if is_left_behind and self.donor is not None:  # who follows it begins anew
                    self.donor.stop()
        let_go_of_failed(since_s=self._longest_operation_s, settled_since_s=self._users_operation_s)

    def _look_for_asks(self, epoch: Epoch) -> bool:
        """Answer the workers that ask to be let in.

        Returns:
            Whether there is a place for a worker that is still there.
        """
        store, own, now_s = self._rendezvous.store, epoch.members[epoch.place], time.monotonic()
        asks = list_asks(store)
        self._rendezvous.memory.note_ids(ask.member.id for ask in asks)
        doubles = find_doubles(asks, epoch.members)
        strangers = [ask for ask in asks if ask.member.settings != own.settings]
        refuse(store, [*strangers, *doubles], own, doubles)
        alike = [ask for ask in asks if ask not in (*strangers, *doubles)]
        before, self._heard = self._heard, {}
        donors = {None, *(member.id for member in epoch.members)}
        for ask in alike:
            orphan = "" if ask.member.donor in donors else ORPHAN
            store.set(ask.seen, f"{self._id} {self._n_looks}{orphan}")
            word = store.get(ask.ready) if store.check([ask.ready]) else ""
            last = before.get(ask.number, ("", now_s))
            self._heard[ask.number] = last if word == last[0] else (word, now_s)
        withdraw(store, [ask for ask in alike if now_s - self._heard[ask.number][1] > _GONE_S])
        has_place = self._rendezvous.count_places(len(epoch.members)) > 0
        eligible = [self._heard[ask.number] for ask in alike if ask.member.donor in donors]
        return has_place and any(word and at_s == now_s for word, at_s in eligible)

    def _answer_announcements(self, epoch: Epoch) -> None:
        """Offer this member's parameters to workers that will join."""
        donor, store = self.donor, self._rendezvous.store
        if donor is None or self._epoch is not epoch:
            return
        self._announcements.begin(store)
        for number, newcomer in self._announcements.list_due(store, lambda: donor.n_served):
            donor.answer(epoch, number, newcomer)
