"""A member's side of a join: its parameters and the replies, sent to workers that will join.

A thread for each newcomer copies pieces of parameters between two commits, and sends them with the
replies of all steps since the first piece, in order.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from distlion import faults
from distlion.crew.epoch import Epoch, Member
from distlion.crew.offers import Offer, make_offer, name_join
from distlion.crew.replies import HasParameters, Piece, StepReply, cut_pieces
from distlion.crew.side_link import Listener, SideLink
from distlion.crew.store import Rendezvous
from distlion.errors import DistlionError, InvalidArgumentError
from distlion.failures import Status
from distlion.step.bucket import Bucket
from distlion.step.inputs import StepInputs
from distlion.step.param import view_row
from distlion.step.stage import Stage
from distlion.wire.background import run_in_background
from distlion.wire.frame import Header
from distlion.wire.verdict import Verdict

logger = logging.getLogger("distlion")

LINK_SHARE = 0.5
"""Share of the link's time that pieces take, unless the caller names a rate."""
_MAKE_UP_S = 2.0
"""Seconds of a vote, in which nothing is sent to newcomers, that are made up for afterwards."""
_RECENT = 32
"""The fastest of so many pieces shows what the link needs; the rest of the others' time is that of
busy cores, or of votes on the same link."""
REPLAY_STEPS = 64
BEAT_S = 0.25
"""Seconds after which a message is sent even without news."""
_COME_S = 10.0
_BEHIND = "behind"


class Donor(Stage):
    """The stage that keeps replies for workers that catch up, and knows when pieces are whole.

    Args:
        rendezvous: The rendezvous, for its store.
        rate_bit_per_s: Rate of pieces to one newcomer; None for half of the link's time.
        replay_steps: Most replies that may wait to be sent.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rate_bit_per_s: float | None = None,
        replay_steps: int = REPLAY_STEPS,
    ) -> None:
        self._rendezvous = rendezvous
        self.rate_bit_per_s, self.replay_steps = rate_bit_per_s, replay_steps
        self.lock = threading.Lock()
        self._feeds: list[Feed] = []
        self._inputs: StepInputs | None = None
        self._holds = False
        self._optimizer: weakref.ref[HasParameters] | None = None
        self.refusal = ""

    def bind(self, optimizer: HasParameters, refusal: str) -> None:
        """Serve the parameters of this optimizer.

        Args:
            optimizer: The optimizer.
            refusal: Reason why its newcomers wait for the old way; "" for none.
        """
        self._optimizer, self.refusal = weakref.ref(optimizer), refusal

    # In a step

    def amend(self, inputs: StepInputs) -> StepInputs:
        self._inputs = inputs
        return inputs

    def exchange(self, buckets: Sequence[Bucket], header: Header) -> tuple[Header, Verdict]:
        """Let no piece be copied until the step is over."""
        self.lock.__enter__()
        self._holds = True
        return header, Verdict(Status.OK)

    def commit(self, buckets: Sequence[Bucket]) -> None:
        feeds = [feed for feed in self._feeds if feed.is_running]
        if not feeds or self._inputs is None:
            return
        try:
            reply = StepReply.of(self._inputs, buckets)
        except (MemoryError, RuntimeError) as error:  # this step is committed all the same
            logger.warning("no memory for replies to newcomers, who begin anew: %s", error)
            for feed in feeds:
                feed.lose()
            return
        for feed in feeds:
            feed.add(reply)

    def end(self) -> None:
        self._inputs = None
        if self._holds:
            self._holds = False
            self.lock.release()

    # Between steps

    @property
    def n_served(self) -> int:
        """Workers that catch up with this member."""
        return sum(feed.is_running for feed in self._feeds)

    def answer(self, epoch: Epoch, number: int, newcomer: Member) -> None:
        """Answer an announcement: with an offer, or with the reason for none."""
        own, rendezvous = epoch.members[epoch.place], self._rendezvous
        why = self.refusal
        if newcomer.settings != own.settings:
            why = "its settings differ from the members'"
        elif rendezvous.count_places(len(epoch.members) + self.n_served) <= 0:
            why = "there is no free place"
        if why:
            make_offer(rendezvous.store, number, Offer(None, [], "", why))
            return
        try:
            listener = Listener(rendezvous.address)
        except (OSError, InvalidArgumentError) as error:
            logger.warning("worker %d cannot listen for newcomers: %s", own.id, error)
            return
        offer = Offer(own.id, listener.addresses, listener.nonce)
        if not make_offer(rendezvous.store, number, offer):
            listener.close()
            return
        feed = Feed(self, listener, number, own.id, newcomer.id)
        with self.lock:
            self._feeds = [each for each in self._feeds if each.is_running] + [feed]
        feed.start()

    def stop(self) -> None:
        """Send nothing any more: the parameters are no longer those of the replies."""
        for feed in self._feeds:
            feed.ended.set()

    def read_step(self) -> int:
        """Return the number of committed steps; under the lock."""
        return self._take().committed_step

    def list_params(self) -> list[Tensor]:
        """List all parameters."""
        return [param.detach() for param in self._take().list_all()]

    def sign(self, name: str, text: str) -> str:
        """Sign a text with the run's secret."""
        return self._rendezvous.store.sign(name, text)

    def _take(self) -> HasParameters:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            raise OSError("the optimizer is gone")
        return optimizer


class Feed:
    """The stream to one newcomer.

    Args:
        donor: The donor.
        listener: The port at which the newcomer is expected.
        number: Number of its announcement.
        own, newcomer: Ids of both workers.

    Attributes:
        ended: Event that ends the stream.
    """

    def __init__(
        self, donor: Donor, listener: Listener, number: int, own: int, newcomer: int
    ) -> None:
        self._donor, self._listener, self._number = donor, listener, number
        self._own, self._newcomer = own, newcomer
        self.ended = threading.Event()
        self._waiting: deque[StepReply] = deque()
        self._pace = Pace(donor.rate_bit_per_s)
        self._has_begun = self._is_behind = self._has_stopped = False

    @property
    def is_running(self) -> bool:
        """True until the stream has ended."""
        return not self._has_stopped

    def start(self) -> None:
        """Begin, on a thread; without one, the newcomer finds nobody and joins another way."""
        try:
            run_in_background(self._run, self.ended, "distlion donor")
        except RuntimeError as error:
            logger.warning("worker %d cannot serve worker %d: %s", self._own, self._newcomer, error)
            self._end(None)

    def add(self, reply: StepReply) -> None:
        """Take a reply that was just committed; under the lock."""
        if not self._has_begun or self._has_stopped or self._is_behind:
            return
        if len(self._waiting) >= self._donor.replay_steps:
            self.lose()
            return
        self._waiting.append(reply)

    def lose(self) -> None:
        """Note that a reply is not kept, so that the newcomer begins anew; under the lock."""
        self._is_behind = True
        self._waiting.clear()

    def _run(self) -> None:
        link: SideLink | None = None
        try:
            name = name_join(self._number)
            link = self._listener.accept(name, self._donor.sign, limit_s=_COME_S)
            self._stream(link)
        except (OSError, ValueError, DistlionError) as error:
            logger.info(
                "worker %d's stream to worker %d has ended, as that one is a member, or gone (%s)",
                self._own, self._newcomer, error,
            )  # fmt: skip
        finally:
            self._end(link)

    def _end(self, link: SideLink | None) -> None:
        self._has_stopped = True
        self._waiting.clear()
        self._listener.close()
        if link is not None:
            link.close()

    def _stream(self, link: SideLink) -> None:
        """Send what there is: replies first, then pieces at their rate, else a beat."""
        donor = self._donor
        with donor.lock:
            params = donor.list_params()
            self._has_begun = True
        pieces = deque(enumerate(cut_pieces(params)))
        sent_s = time.monotonic()
        while not self.ended.is_set():
            now_s = time.monotonic()
            with donor.lock:
                head, reply = donor.read_step(), self._take_reply()
            if self._is_behind:
                link.send({"kind": _BEHIND, "head": head})
                return
            if reply is not None:
                payload = torch.cat([bucket.payload for bucket in reply.buckets])
                link.send({"kind": "reply", "head": head, **reply.describe()}, payload)
                sent_s = time.monotonic()
            elif pieces and now_s >= self._pace.due_s:
                number, piece = pieces.popleft()
                self._send_piece(link, number, piece, params[piece.index])
                sent_s = time.monotonic()
            elif now_s - sent_s >= BEAT_S:
                link.send({"kind": "beat", "head": head})
                sent_s = now_s
            else:
                wait_s = max(0.0005, self._pace.due_s - now_s) if pieces else 0.005
                self.ended.wait(min(0.005, wait_s))

    def _take_reply(self) -> StepReply | None:
        return self._waiting.popleft() if self._waiting else None

    def _send_piece(self, link: SideLink, number: int, piece: Piece, param: Tensor) -> None:
        """Copy and send a piece."""
        donor = self._donor
        with donor.lock:
            step = donor.read_step()
            values = _copy(param, piece)
        if faults.armed:
            faults.fire(rank=self._own, step=number, point="stream", subject=self)
        began_s = time.monotonic()
        link.send({"kind": "piece", "number": number, "step": step, "head": step}, values)
        link.receive(0)  # it has come: the time to here is that of the link, not of its buffers
        self._pace.note(values.numel(), began_s, time.monotonic())


class Pace:
    """When the next piece may be sent.

    Args:
        rate_bit_per_s: The rate of pieces; None for ``LINK_SHARE`` of the link's time.

    Attributes:
        due_s: When, by the monotonic clock.
    """

    def __init__(self, rate_bit_per_s: float | None) -> None:
        self._rate_bit_per_s = rate_bit_per_s
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds a byte
        self.due_s = -math.inf

    def note(self, n_bytes: int, began_s: float, came_s: float) -> None:
        """Note a piece of so many bytes that was sent, and came, at these moments."""
        if self._rate_bit_per_s is not None:
            interval_s = 8 * n_bytes / self._rate_bit_per_s
        else:
            self._recent.append((came_s - began_s) / n_bytes)
            interval_s = min(self._recent) * n_bytes / LINK_SHARE
        earliest_s = began_s if self.due_s == -math.inf else began_s - _MAKE_UP_S
        self.due_s = max(self.due_s, earliest_s) + interval_s


def _copy(param: Tensor, piece: Piece) -> Tensor:
    """Copy a piece into host memory, after all commits that were launched."""
    if param.is_cuda:
        torch.cuda.synchronize(param.device)
    flat = param.contiguous().view(-1)[piece.start : piece.stop]
    return view_row(flat.to("cpu", copy=True), torch.uint8)
