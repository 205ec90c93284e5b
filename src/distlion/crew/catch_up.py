"""A newcomer's side of a join: it catches up while the others train, before it asks to be let in.

So does a member that the others have trained on without, such as one that wakes after a stop.

    announce ──► a member offers ──► pieces and replies ──► at most a step behind ──► ask

Its parameters are then those of its donor after the last step that both have, and become the
members' by the last replies. A donor that is lost, or a newcomer that falls behind, begins anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from distlion import faults
from distlion.crew.epoch import Epoch, FormingError, Member, decline
from distlion.crew.lanes import Lanes, OneLane
from distlion.crew.offers import announce, await_offer, name_join
from distlion.crew.replies import HasParameters, ReplayError, Replica, StepReply
from distlion.crew.side_link import SideLink, dial
from distlion.crew.store import Rendezvous
from distlion.errors import CrewError
from distlion.signals import LISTEN_S
from distlion.step.newcomers import Newcomers
from distlion.votes.aggregation import Aggregation
from distlion.wire.background import run_in_background

logger = logging.getLogger("distlion")

OFFER_S = 2.0
"""Seconds that a newcomer waits for an offer."""
TRIES = 3
"""Times that a newcomer catches up before it gives up, or joins the old way."""
ARRIVE_S = 1.4
"""Seconds for the last replies; the members wait for all members of an epoch a little longer."""
_POLL_S = 0.005
_ROOM_BYTES = 64 << 20
"""More bytes of a message than elements account for: shards and buckets are padded."""


class LostDonorError(FormingError):
    """The donor is gone, or its stream was of no use."""


class CatchUp:
    """One attempt to catch up with one donor.

    Args:
        link: The connection to the donor.
        own, donor: Ids of both workers.
        replica: This worker's parameters. Written from now on.

    Attributes:
        donor: The donor's id.
        problem: Why the attempt has failed; "" if it has not.
        is_behind: Whether it has failed because this worker was too slow.
        step: Number of steps in all parameters; None until all are at one step.
        n_bytes, n_replies: Bytes of parameters, and replies, so far.
    """

    def __init__(self, link: SideLink, own: int, donor: int, replica: Replica) -> None:
        self.donor, self.problem, self.is_behind = donor, "", False
        self.step: int | None = None
        self.n_bytes = self.n_replies = 0
        self._link, self._own, self._replica = link, own, replica
        self._head = 0
        self._until: int | None = None
        self._ended, self._stopped = threading.Event(), threading.Event()
        n_elements = sum(piece.stop - piece.start for piece in replica.pieces)
        self._most_bytes = _ROOM_BYTES + 8 * n_elements
        run_in_background(self._run, self._ended, "distlion catches up")

    @property
    def is_close(self) -> bool:
        """True while it is at most a step behind."""
        return self.step is not None and self.step >= self._head - 1

    def arrive(self, step: int) -> None:
        """Take the replies up to this step, and none after it.

        Raises:
            LostDonorError: They do not come.
        """
        self._until, deadline_s = step, time.monotonic() + ARRIVE_S
        while self.step != step:
            if self.problem or (self.step or 0) > step or time.monotonic() > deadline_s:
                why = self.problem or "the last replies did not come"
                raise LostDonorError(f"worker {self.donor} was to send step {step}: {why}")
            time.sleep(_POLL_S)
        self._replica.settle()

    def go_on(self) -> None:
        """Take later replies again, as no epoch was formed."""
        self._until = None

    def end(self) -> None:
        """End it, and wait until nothing is written any more."""
        self._ended.set()
        self._link.close()
        while not self._stopped.wait(LISTEN_S):  # at most one replay
            pass

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._take_message()
        except Exception as error:  # noqa: BLE001 whoever waits for this thread must hear of it
            self.problem = self.problem or str(error) or type(error).__name__
        finally:
            self._link.close()
            self._stopped.set()

    def _take_message(self) -> None:
        header, payload = self._link.receive(self._most_bytes)
        kind, replica = header["kind"], self._replica
        if kind == "piece":
            self._fire("piece", header["number"])
            replica.place(header["number"], header["step"], payload)
            self.n_bytes += payload.numel()
            self._link.send({})
        elif kind == "reply":
            reply = StepReply.read(header, payload)
            while self._until is not None and reply.step >= self._until:
                if self._ended.wait(_POLL_S):
                    return
            self._fire("replay", reply.step)
            replica.replay(reply)
            self.n_replies += 1
        elif kind == "behind":
            self.is_behind = True
            raise ReplayError("this worker replays more slowly than the others train")
        self._head = header["head"]
        steps = replica.find_steps() if replica.is_complete else set()
        self.step = steps.pop() if len(steps) == 1 else None

    def _fire(self, point: faults.JoinPoint, step: int) -> None:
        if faults.armed:
            faults.fire(rank=self._own, step=step, point=point, subject=self)


def _await_close(catch_up: CatchUp) -> bool:
    """Wait until this worker is at most a step behind; return False if the attempt fails."""
    while not catch_up.is_close and not catch_up.problem:
        time.sleep(_POLL_S)
    return not catch_up.problem


def find_refusal(
    newcomers: Newcomers, rules: Sequence[Aggregation], lanes: OneLane, *, is_local: bool
) -> str:
    """Find the reason why the others have to wait for newcomers; "" for none."""
    if isinstance(lanes, Lanes):
        return f"its members have {lanes.number} processes each"
    if is_local:
        return "local steps are shared at votes"
    if newcomers != "zeros":
        return f"newcomers={newcomers!r} copies momenta"
    for rule in rules:
        if rule.worker_state:
            return f"{type(rule).__name__} keeps state of each worker"
    return ""


class Newcomer:
    """A worker whose parameters are not those of the members, until it is one.

    Args:
        rendezvous: The rendezvous.
        refusal: Reason why it joins the old way, for which the others wait; "" for none.
        optimizer: Its optimizer.
    """

    def __init__(self, rendezvous: Rendezvous, refusal: str, optimizer: HasParameters) -> None:
        self._rendezvous, self._refusal = rendezvous, refusal
        self._optimizer = optimizer
        self._catch_up: CatchUp | None = None
        self._params: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._has_entered = False
        self._tries = self._tries_behind = self._tries_late = 0
        self._problem = ""
        self._began_s = 0.0

    def find_donor(self, own: Member) -> int | None:
        """Catch up with a member; return its id, or None where this worker joins the old way.

        Raises:
            CrewError: This worker falls behind each time, or the run is over.
            DistError: The store is away.
        """
        rendezvous = self._rendezvous
        if self._catch_up is not None:
            self._catch_up.go_on()  # an epoch was not formed
        while self._catch_up is None or not _await_close(self._catch_up):
            self._leave_donor()
            if not rendezvous.find_last_begun():
                return None
            if self._tries >= TRIES:
                self._problem = self._problem or f"it could not catch up in {TRIES} attempts"
            if why := self._refusal or self._problem:
                logger.info("worker %d joins while others wait: %s", own.id, why)
                return None
            if not self._begin(own):
                return None
        if faults.armed:
            faults.fire(rank=own.id, step=0, point="caught_up", subject=self)
        return self._catch_up.donor

    def _begin(self, own: Member) -> bool:
        """Find a donor, and begin; return False where nobody offers."""
        rendezvous, began_s = self._rendezvous, time.monotonic()

        def look() -> None:
            rendezvous.check_open()
            rendezvous.is_somebody_alive()  # if nobody offers, this silence counts as well

        rendezvous.check_secret()
        number = announce(rendezvous.store, own)
        offer = await_offer(rendezvous.store, number, limit_s=OFFER_S, check=look)
        if offer is None or offer.donor is None:
            why = "no member has offered its parameters" if offer is None else offer.why
            logger.info("worker %d joins while others wait: %s", own.id, why)
            return False
        self._tries += 1
        sign = rendezvous.store.sign
        try:
            link = dial(offer.addresses, name_join(number), sign, offer.nonce)
        except OSError as error:
            logger.warning(
                "worker %d cannot connect to worker %d, to catch up with it: %s",
                own.id, offer.donor, error,
            )  # fmt: skip
            return self._tries < TRIES and self._begin(own)
        # What is written is not this worker's own until all has come: others may die before.
        self._params = self._optimizer.list_all()
        self._kept = [param.detach().clone() for param in self._params]
        self._catch_up = CatchUp(link, own.id, offer.donor, self._optimizer.make_replica())
        self._began_s = began_s
        return True

    def _leave_donor(self) -> None:
        """Leave a donor with which this worker has not caught up, if there is one.

        Raises:
            CrewError: It is new, and falls behind each time. A member that was left behind joins
                the old way then.
        """
        catch_up = self._catch_up
        if catch_up is None:
            return
        logger.warning("this worker loses worker %d: %s", catch_up.donor, catch_up.problem)
        self._tries_behind += catch_up.is_behind
        self.give_up()
        if self._tries_behind >= TRIES and not self._has_entered:
            raise CrewError(
                f"this worker has fallen behind the others {TRIES} times while it copied their "
                "parameters; raise handover_rate= or replay_steps= of all members, or give it a "
                "faster link"
            )

    def is_ready(self, donor_trains: bool) -> bool:
        """Return whether this worker may be let in now; True where it follows nobody.

        Args:
            donor_trains: Whether its donor is still a member.

        Raises:
            LostDonorError: Its donor is gone.
        """
        catch_up = self._catch_up
        if catch_up is None:
            return True
        if not donor_trains:
            catch_up.problem = catch_up.problem or "the others train without it"
        if catch_up.problem:
            raise LostDonorError(catch_up.problem)
        return catch_up.is_close

    def arrive(self, epoch: Epoch) -> None:
        """Come to the step of an epoch's members.

        Raises:
            LostDonorError: It cannot; the others form an epoch without it.
        """
        if not epoch.is_follower:
            self.give_up()
            return
        try:
            if self._catch_up is None:
                raise LostDonorError("the donor is gone")
            self._catch_up.arrive(epoch.members[0].step)
        except LostDonorError:
            decline(epoch)
            self._note_late()
            raise

    def _note_late(self) -> None:
        """Leave a donor that is lost, or whose last replies were late too often."""
        if self._catch_up is None or self._catch_up.problem:
            self._leave_donor()
            return
        self._tries_late += 1
        if self._tries_late >= TRIES:
            self._problem = (
                f"the last replies took more than {ARRIVE_S:g} s in {TRIES} attempts: they are too "
                "large for this link"
            )
            self.give_up()

    def keep(self) -> None:
        """Note that the parameters are this worker's own, whatever follows."""
        self._params, self._kept = [], []

    def enter(self, own: int) -> None:
        """Note that this worker is a member."""
        catch_up, self._catch_up, self._has_entered = self._catch_up, None, True
        self._forget_tries()
        if catch_up is not None:
            catch_up.end()
            logger.info(
                "worker %d came while the others trained: %.1f MB from worker %d in %.2f s, "
                "and %d replies",
                own,
                catch_up.n_bytes / 1e6,
                catch_up.donor,
                time.monotonic() - self._began_s,
                catch_up.n_replies,
            )

    def _forget_tries(self) -> None:
        self._tries = self._tries_behind = self._tries_late = 0
        self._problem = ""

    @torch.no_grad()
    def give_up(self) -> None:
        """Follow nobody; parameters are what they were, unless they are to be kept."""
        if self._catch_up is None:
            return
        self._catch_up.end()
        for param, kept in zip(self._params, self._kept, strict=True):
            param.copy_(kept)
        self._catch_up = None
        self.keep()
