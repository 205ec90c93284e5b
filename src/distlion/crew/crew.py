"""The crew: the workers of a run, of which some may be lost while others join."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.distributed import DistError
from torch.optim.optimizer import ParamsT

from distlion.crew.carried import Carried, Luggage
from distlion.crew.epoch import (
    Epoch,
    Member,
    describe_self,
    find_last_begun,
    meet,
    note_begun,
    shrink,
    take_id,
)
from distlion.crew.optimizer import CrewLion
from distlion.crew.rendezvous import MOST_WORKERS, Rendezvous
from distlion.errors import CrewError, InvalidArgumentError
from distlion.options import Newcomers, check_newcomers
from distlion.transport import let_go_of_failed

logger = logging.getLogger("distlion")

SECRET_VARIABLE = "DISTLION_CREW_SECRET"
_LOOK_S, _TURNS = 0.5, "turns to sit out"
# Longer than the others need: torch takes a worker out 6 s after its last word.
_SIT_OUT_S, _MOST_SIT_OUT_S = 10.0, 60.0


class Crew:
    """The workers of a run: some may be lost, return or join while the others train on.

    An *epoch* is a roster of workers and the process group made for them, which is the default
    group of this process. Within an epoch all holds that holds for ``DistributedLion``. Between two
    epochs parameters are copied bit for bit from the most advanced worker.

    Args:
        endpoint: "host:port" of a store that outlives workers: ``distlion crew --port 29400``.
        min_workers: The least that train, 2 or more; fewer wait for others. More than half of all
            keep a network that falls apart from going on as two runs.
        max_workers: The most.
        run_id: Name of the run; runs with different names may share a store.
        secret: What the workers of this run alone know; None: DISTLION_CREW_SECRET. It signs what
            workers read from the store. Without one, who reaches the store can run code here.
        newcomers: The momentum that a newcomer begins with: "zeros", that of the "donor" from whom
            it has its parameters, or the "mean" of all others.
        wait_timeout_s: Seconds that fewer than ``min_workers`` wait for others.

    Raises:
        InvalidArgumentError: A value is out of range.
        CrewError: No store answers at the endpoint.

    Notes:
        The store is the one thing that must live: without it all workers stop with a CrewError.

    Example:
        >>> with distlion.Crew("head:29400", min_workers=3) as crew:
        ...     optimizer = crew.optimizer(model.named_parameters(), lr=1e-4)
        ...     while optimizer.committed_step < 10_000:
        ...         batch = take(optimizer.committed_step, crew.place, crew.size)
        ...         model(batch).loss.backward()
        ...         optimizer.step()  # False where members changed: the batch is taken again
        ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        endpoint: str,
        *,
        min_workers: int = 2,
        max_workers: int = MOST_WORKERS,
        run_id: str = "run",
        secret: str | None = None,
        newcomers: Newcomers = "zeros",
        wait_timeout_s: float = 600,
    ) -> None:
        if not 2 <= min_workers <= max_workers <= MOST_WORKERS:
            raise InvalidArgumentError(
                f"min_workers={min_workers}, max_workers={max_workers}: expected 2 <= min_workers "
                f"<= max_workers <= {MOST_WORKERS}; a single worker trains with distlion.Lion"
            )
        check_newcomers(newcomers)
        if not run_id:
            raise InvalidArgumentError("run_id='': expected a name")
        secret = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
        if not secret:
            logger.warning(
                "the crew has no secret: whoever reaches %s can run code on all workers; set %s "
                "to the same random words on all of them",
                endpoint,
                SECRET_VARIABLE,
            )
        self.newcomers: Newcomers = newcomers
        self.min_workers, self._wait_timeout_s = min_workers, wait_timeout_s
        self._rendezvous = Rendezvous(
            endpoint,
            run_id=run_id,
            secret=secret,
            min_workers=min_workers,
            max_workers=max_workers,
            wait_timeout_s=wait_timeout_s,
        )
        try:
            self._id = take_id(self._rendezvous.store)
        except DistError as error:
            raise CrewError(f"the store at {endpoint} is gone ({error})") from error
        self.luggage = Luggage()
        self._optimizer: weakref.ref[CrewLion] | None = None
        self._epoch: Epoch | None = None
        self._wants_change, self._changing, self._n_looks = False, threading.Lock(), 0
        self._trouble: CrewError | None = None
        self._ended = threading.Event()
        watcher = threading.Thread(
            target=_look_for_newcomers,
            args=(weakref.ref(self), self._ended),
            name="distlion crew",
            daemon=True,
        )
        watcher.start()
        weakref.finalize(self, self._ended.set)

    @property
    def id(self) -> int:
        """The number of this worker, which nobody else of the run gets."""
        return self._id

    @property
    def epoch(self) -> Epoch:
        """The present epoch.

        Raises:
            CrewError: None was formed yet.
        """
        if self._epoch is None:
            raise CrewError("the crew has formed no epoch yet; make its optimizer first")
        return self._epoch

    @property
    def place(self) -> int:
        """The place of this worker among the present members; its rank."""
        return self.epoch.place

    @property
    def size(self) -> int:
        """Number of present members."""
        return len(self.epoch.members)

    @property
    def wants_change(self) -> bool:
        """True if somebody waits to join, so that the epoch has to end.

        Raises:
            CrewError: The store is gone.
        """
        if self._trouble is not None:
            raise self._trouble
        return self._wants_change

    def optimizer(
        self,
        params: ParamsT,
        *args: Any,
        carry: Mapping[str, Carried] | None = None,
        buffers: Iterable[Tensor] = (),
        **options: Any,
    ) -> CrewLion:
        """Make the optimizer of this worker, and wait until the first epoch is formed.

        Args:
            params: As for ``DistributedLion``.
            *args: As for ``DistributedLion``.
            carry: By name, objects whose state a newcomer takes from the most advanced worker, such
                as a learning-rate scheduler; all workers give the same names.
            buffers: Tensors that a newcomer takes from it too, ``model.buffers()``.
            **options: As for ``DistributedLion``, but for ``process_group``, ``nodes`` and
                ``momentum_sync``. ``init_timeout_s`` is 30 unless it is given: a member that falls
                silent while an epoch is formed is waited for so long.

        Raises:
            InvalidArgumentError: The crew has an optimizer already, or cannot have this option.
            UnsupportedTypeError: Parameters are DTensors.
            CrewError: Fewer than ``min_workers`` came in time.
        """
        if self._optimizer is not None:
            raise InvalidArgumentError("a crew has one optimizer; give it all parameters")
        self.carry(**(carry or {}))
        optimizer = CrewLion(self, params, *args, buffers=buffers, **options)
        self._optimizer = weakref.ref(optimizer)
        optimizer.form(())
        return optimizer

    def carry(self, **carried: Carried) -> None:
        """Let newcomers take the state of these objects from the most advanced worker.

        A newcomer makes its scheduler when its optimizer has joined; it takes its state here.
        """
        has_taken = self.luggage.add(carried)
        optimizer = None if self._optimizer is None else self._optimizer()
        if has_taken and optimizer is not None:
            optimizer.take_told_groups()  # a new scheduler has begun with its first rate

    def describe(self, *, epoch: int, step: int, settings: int) -> Member:
        """Describe this worker as a member.

        Args:
            epoch: The last epoch that it was whole in.
            step: Steps that its parameters have seen.
            settings: Digest of what must be equal on all.
        """
        return describe_self(self._id, epoch=epoch, step=step, settings=settings)

    def find_next(self, own: Member, lost: Collection[int]) -> Epoch:
        """Find the next epoch: of those who are left, or of who comes to the rendezvous.

        Args:
            own: This worker.
            lost: Ranks in the present epoch of those who are lost, as all others found.

        Raises:
            CrewError: Fewer than ``min_workers`` came in time, or the store is gone.
        """
        found = None
        if self._epoch is not None and lost:
            ids = {self._epoch.members[rank].id for rank in lost}
            found = shrink(self._rendezvous, self._epoch, own, ids, min_workers=self.min_workers)
        if found is None:
            logger.info("worker %d waits for %d workers or more", self._id, self.min_workers)
            found = meet(self._rendezvous, own, min_workers=self.min_workers)
        return found

    def enter(self, epoch: Epoch, *, seconds: float) -> None:
        """Note that an epoch was formed, and say who left and who came."""
        before = set() if self._epoch is None else {each.id for each in self._epoch.members}
        now = {member.id for member in epoch.members}
        logger.info(
            "epoch %d of %d workers formed in %.2f s at step %d, rank %d here; left: %s; came: %s",
            epoch.number,
            len(epoch.members),
            seconds,
            epoch.members[0].step,
            epoch.place,
            _list(before - now),
            _list(now - before),
        )
        with self._changing:
            self._epoch, self._wants_change = epoch, False
        if epoch.place == 0:
            with suppress(DistError):  # a store that is gone is noticed where it is needed
                note_begun(self._rendezvous.store, epoch.number)
            self._rendezvous.publish(epoch.describe())

    def check_patience(self, began_s: float, error: Exception) -> None:
        """Say why an epoch was not formed, and end where that has gone on for too long.

        Raises:
            CrewError: Nothing has come about for ``wait_timeout_s``.
        """
        limit_s = self._wait_timeout_s
        logger.warning("worker %d: no epoch was formed, once more: %s", self._id, str(error))
        if time.monotonic() - began_s > limit_s:
            raise CrewError(
                f"workers came to the store and not to each other for {limit_s:g} s ({error}); can "
                "they connect at any port? GLOO_SOCKET_IFNAME names the interface"
            ) from error

    def sit_out(self, epoch: Epoch, failures: int) -> None:
        """Let the others form an epoch without this worker, if it is to blame that they cannot.

        Workers that reach the store and not each other would form an epoch in vain for ever. From
        the second time on one of them stays away for a while, each time for longer. Nobody knows
        whom the others do not reach, so that they take turns, which the store counts.
        """
        ids, store = sorted(member.id for member in epoch.members), self._rendezvous.store
        if failures < 2 or len(ids) <= self.min_workers:
            return
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            turn = store.add(_TURNS, 0)
            if ids[-1 - turn % len(ids)] == self._id:
                seconds = min(_SIT_OUT_S * 2 ** (failures - 2), _MOST_SIT_OUT_S)
                logger.warning("worker %d lets others form an epoch for %g s", self._id, seconds)
                self._rendezvous.leave()
                self._ended.wait(seconds)
                store.add(_TURNS, 1)

    def finish(self) -> None:
        """Wait until all members have come to their end; one that lags gets its last step here.

        One that is alone at its end warns, after ``wait_timeout_s``.

        Raises:
            CrewError: The store is gone.
        """
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or self._epoch is None:
            return
        try:
            while not self._have_all_finished(optimizer):
                optimizer.form(())
        except DistError as error:
            raise CrewError(
                f"the store is gone ({error}): this worker has come to its end, and does not know "
                "of the others"
            ) from error
        except CrewError as error:
            logger.warning("worker %d has come to its end, the last of all: %s", self._id, error)
        self._ended.set()
        self._rendezvous.close()

    def _have_all_finished(self, optimizer: CrewLion) -> bool:
        """Wait; False where somebody was lost, failed in its last step, or says nothing any more.

        Nobody waits for a member in a step any more, so that its own word has to tell that it is
        there: of one that computes, it comes from the thread that looks for newcomers.
        """
        epoch, limit_s = self.epoch, optimizer.silence_s
        heard: dict[str, tuple[bytes, float]] = {}
        epoch.store.set(f"finished/{self._id}", "")
        left = [str(member.id) for member in epoch.members]
        while left := [each for each in left if not epoch.store.check([f"finished/{each}"])]:
            if optimizer.has_lost_somebody:
                return False
            now_s = time.monotonic()
            for each in left:
                word = epoch.store.get(key) if epoch.store.check([key := f"alive/{each}"]) else b""
                if each not in heard or heard[each][0] != word:
                    heard[each] = word, now_s
                elif now_s - heard[each][1] > limit_s:
                    logger.warning("worker %s says nothing; the others end without it", each)
                    return False
            time.sleep(0.05)
        return True

    def _look(self, epoch: Epoch) -> None:
        """Look whether somebody waits to join, or others have begun an epoch without this worker.

        They may have where a network fell apart, or all members of this one's epoch were busy for
        too long: then these go to the others.
        """
        try:
            waits = self._rendezvous.count_waiting(len(epoch.members)) > 0
            is_left_behind = find_last_begun(self._rendezvous.store) > epoch.number
        except Exception as error:  # noqa: BLE001 it must not end this thread without a word
            advice = "start it again and resume all workers from a checkpoint"
            self._trouble = CrewError(f"the store of the crew is gone ({error}); {advice}")
            return
        with self._changing:
            if (waits or is_left_behind) and self._epoch is epoch:
                self._wants_change = True
        self._n_looks += 1
        with suppress(DistError):  # a store that is gone is noticed where it is needed
            epoch.store.set(f"alive/{self._id}", str(self._n_looks))
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            let_go_of_failed(since_s=optimizer.longest_operation_s)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish; after an error leave, so that the others go on without this worker."""
        if error is None:
            self.finish()
        else:
            self._ended.set()
            self._rendezvous.leave()
        if self._optimizer is not None and (optimizer := self._optimizer()) is not None:
            optimizer.leave()


def _look_for_newcomers(crew: weakref.ref[Crew], ended: threading.Event) -> None:
    while not ended.wait(_LOOK_S):
        found = crew()
        if found is None:
            return
        if found._epoch is not None:
            found._look(found._epoch)
        del found


def _list(ids: Collection[int]) -> str:
    return ", ".join(f"worker {each}" for each in sorted(ids)) or "nobody"
