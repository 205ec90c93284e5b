"""The crew: the workers of a run, some of which may be lost while others join."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, DistStoreError
from torch.optim.optimizer import ParamsT

from distlion.crew.carried import Carried
from distlion.crew.donor import REPLAY_STEPS, Donor
from distlion.crew.epoch import Epoch, TooFewError, listen
from distlion.crew.lanes import Lanes
from distlion.crew.local_steps import CrewLocalSteps
from distlion.crew.membership import Membership
from distlion.crew.optimizer import CrewLion
from distlion.crew.retry import RetryingLion, check_retry
from distlion.crew.store import (
    MOST_WORKERS,
    STORE_TIMEOUT_S,
    STORE_WAIT_S,
    Rendezvous,
    parse_endpoint,
)
from distlion.errors import CrewError, InvalidArgumentError
from distlion.local.local_steps import Inner
from distlion.numpy_numbers import as_python
from distlion.step.arguments import check_count, check_positive, check_seconds
from distlion.step.lifecycle import name_error
from distlion.step.newcomers import Newcomers, check_newcomers
from distlion.wire.heartbeats import BEAT_S
from distlion.wire.tcp import choose_wire

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("distlion")


def have_all_finished(
    epoch: Epoch, optimizer: CrewLion, *, silence_s: float, absence_s: float = 0.0
) -> bool:
    """Wait; return False if a member was lost, failed in its last step, or fell silent.

    Nobody waits for a member in a step any more, so each must show that it is alive.

    Args:
        epoch: The present epoch.
        optimizer: This worker's optimizer.
        silence_s: Seconds without a heartbeat after which a member is silent.
        absence_s: Seconds in which others may come back to a store that was away; 0 for none.
    """
    heartbeats = listen(epoch, silence_s=silence_s)
    if absence_s:
        heartbeats.begin_anew(absence_s)
    names, store = epoch.names, epoch.store
    store.set(f"finished/{names[epoch.rank]}", "")
    left = list(range(len(names)))
    while left := [rank for rank in left if not store.check([f"finished/{names[rank]}"])]:
        if optimizer.has_lost_somebody:
            return False
        for rank in heartbeats.find_silent(left):
            logger.warning("worker %s is silent; the others end without it", names[rank])
            return False
        time.sleep(0.05)
    return True


SECRET_VARIABLE = "DISTLION_CREW_SECRET"


def find_secret(secret: str | None, endpoint: str) -> str:
    """Return the secret, or that of this process's environment; warn where there is none."""
    secret = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
    if not secret:
        logger.warning(
            "the crew has no secret: anyone who reaches %s can change its weights; set %s to the "
            "same random words on all of them",
            endpoint,
            SECRET_VARIABLE,
        )
    return secret


SILENCE_S, LEAST_SILENCE_S = 2.0, 1.0
"""Seconds without a heartbeat, unless the caller says otherwise, and at least."""


def check_silence(silence_s: float) -> None:
    """Check the seconds without a heartbeat after which a member is given up.

    Raises:
        InvalidArgumentError: They are fewer than heartbeats need.
    """
    check_seconds("silence_s", silence_s)
    if silence_s < LEAST_SILENCE_S:
        raise InvalidArgumentError(
            f"silence_s={silence_s:g}: expected {LEAST_SILENCE_S:g} or more; heartbeats come "
            f"every {BEAT_S:g} s, and later from a busy machine"
        )


def check_workers(min_workers: int, max_workers: int) -> None:
    """Check the fewest and the most workers that train.

    Raises:
        UnsupportedTypeError: One is not an integer.
        InvalidArgumentError: They are out of range.
    """
    check_count("min_workers", min_workers)
    check_count("max_workers", max_workers)
    if not 2 <= min_workers <= max_workers <= MOST_WORKERS:
        raise InvalidArgumentError(
            f"min_workers={min_workers}, max_workers={max_workers}: expected 2 <= min_workers "
            f"<= max_workers <= {MOST_WORKERS}; a single worker trains with distlion.Lion"
        )


def check_handover(handover_rate: float | None, replay_steps: int) -> None:
    """Check the rate at which a member sends parameters, and the number of replies that it keeps.

    Raises:
        InvalidArgumentError: One is out of range.
    """
    if handover_rate is not None:
        check_positive("handover_rate", handover_rate)
    if type(replay_steps) is not int or replay_steps < 1:
        raise InvalidArgumentError(f"replay_steps={replay_steps!r}: expected 1 or more")


class Crew:
    """The workers of a run: some may be lost, return or join while the others train on.

    An *epoch* is a roster of workers and the process group made for them, which is the default
    group of this process. Within an epoch everything is as in ``DistributedLion``. Between two
    epochs parameters are copied bit for bit from the most advanced worker.

    Args:
        endpoint: "host:port" of a store that outlives workers: ``distlion crew --port 29400``. An
            IPv6 address stands in brackets: "[::1]:29400".
        member: The processes of this member, which FSDP2 shards parameters over: a mesh of one dim,
            or their process group. They enter and leave epochs together. All members have as many.
            None: this process alone.
        min_workers: Fewest workers that train, 2 or more; fewer wait for others. With more than
            half of all workers, a network that splits cannot continue as two runs.
        max_workers: Most workers that train.
        run_id: Name of the run; runs with different names may share a store.
        secret: Secret of this run's workers; None: DISTLION_CREW_SECRET. It signs the data in the
            store. Without a secret, anyone who reaches the store can join the run.
        newcomers: A newcomer's first momentum: "zeros", the one of the "donor" that gives it its
            parameters, or the "mean" of all others.
        handover_rate: Bits a second at which a member sends its parameters to a newcomer, beside
            its votes, in the mean; None for half of the time of its link.
        replay_steps: Most replies of steps that a member keeps for a newcomer that is slow; a reply
            has a bit or more per element. A newcomer that falls further behind begins anew.
        wait_timeout_s: Seconds that fewer than ``min_workers`` wait for others; ``math.inf`` for no
            end.
        store_timeout_s: Seconds that the store may be silent before it counts as lost.
        store_wait_s: Seconds that a worker waits for a store that is lost once it needs it. Steps
            do not need it; to let workers in, to go on after a loss and to finish do.
        silence_s: Seconds without a heartbeat after which the others give a member up that they
            wait for; one that computes for long keeps its place, unless a single call holds
            Python's lock for as long. 1 or more. After a loss of all members, new workers wait
            twice as long, and 4 s at least, before they begin anew.

    Raises:
        InvalidArgumentError: A value is out of range.
        UnsupportedTypeError: The endpoint is not text, or a number is none.
        ProcessGroupError: This process is not in the group of ``member``.
        CrewError: No store answers at the endpoint.
        KernelBackendError: distlion's own sockets were not built.

    Notes:
        The store may be lost and started again: steps go on without it, and the members restore
        what the run needs (``crew/memory.py``).

    Example:
        >>> with distlion.Crew("head:29400", min_workers=3) as crew:
        ...     optimizer = crew.optimizer(model.named_parameters(), lr=1e-4)
        ...     while optimizer.committed_step < 10_000:
        ...         crew.admit()  # lets newcomers in
        ...         batch = take(optimizer.committed_step, crew.rank, crew.size)
        ...         model(batch).loss.backward()
        ...         optimizer.step()  # False where members changed: the batch is taken again
        ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        endpoint: str,
        *,
        member: dist.ProcessGroup | DeviceMesh | None = None,
        min_workers: int = 2,
        max_workers: int = MOST_WORKERS,
        run_id: str = "run",
        secret: str | None = None,
        newcomers: Newcomers = "zeros",
        handover_rate: float | None = None,
        replay_steps: int = REPLAY_STEPS,
        wait_timeout_s: float = 600,
        store_timeout_s: float = STORE_TIMEOUT_S,
        store_wait_s: float = STORE_WAIT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        parse_endpoint(endpoint)
        min_workers, max_workers = as_python(min_workers), as_python(max_workers)
        wait_timeout_s, silence_s = as_python(wait_timeout_s), as_python(silence_s)
        store_timeout_s, store_wait_s = as_python(store_timeout_s), as_python(store_wait_s)
        handover_rate, replay_steps = as_python(handover_rate), as_python(replay_steps)
        check_workers(min_workers, max_workers)
        check_newcomers(newcomers)
        if wait_timeout_s != math.inf:
            check_seconds("wait_timeout_s", wait_timeout_s)
        check_seconds("store_timeout_s", store_timeout_s)
        check_seconds("store_wait_s", store_wait_s)
        check_silence(silence_s)
        check_handover(handover_rate, replay_steps)
        choose_wire()  # others would wait for a worker that finds out later that it cannot connect
        self._handover_rate, self._replay_steps = handover_rate, replay_steps
        if not run_id:
            raise InvalidArgumentError(f"run_id={run_id!r}: expected a name")
        lanes = None if member is None else Lanes(member)
        rendezvous = Rendezvous(
            endpoint,
            run_id=run_id,
            secret=find_secret(secret, endpoint),
            min_workers=min_workers,
            max_workers=max_workers,
            store_timeout_s=store_timeout_s,
            store_wait_s=store_wait_s if lanes is None else None,
            silence_s=silence_s,
        )
        try:
            self._membership = Membership(
                rendezvous,
                min_workers=min_workers,
                newcomers=newcomers,
                wait_timeout_s=wait_timeout_s,
                silence_s=silence_s,
                lanes=lanes,
            )
        except DistError as error:
            raise CrewError(f"the store at {endpoint} is gone ({error})") from error
        self._optimizer: weakref.ref[CrewLion] | None = None

    @property
    def id(self) -> int:
        """The number of this worker, unique in the run."""
        return self._membership.id

    @property
    def epoch(self) -> Epoch:
        """The present epoch.

        Raises:
            CrewError: No epoch was formed yet.
        """
        return self._membership.epoch

    @property
    def rank(self) -> int:
        """The place of this worker among the present members."""
        return self.epoch.place

    @property
    def lane(self) -> int:
        """The number of this process in its member."""
        return self._membership.lanes.lane

    @property
    def n_lanes(self) -> int:
        """Number of processes of each member."""
        return self._membership.lanes.number

    @property
    def size(self) -> int:
        """Number of present members."""
        return len(self.epoch.members)

    @property
    def wants_change(self) -> bool:
        """True if somebody wants to join, so that the epoch has to end.

        Only the first process of a member looks; it is False on the others.

        Raises:
            CrewError: The store has another run, or values of a stranger.
        """
        return self._membership.lookout.wants_change

    def admit(self) -> bool:
        """Let in the workers that the last step found waiting, before the next batch is taken.

        ``CrewSampler.take()`` calls it. Members that call it wait for each other and form the next
        epoch before their backward pass, so that ``step()`` need not give one up. All processes of
        all members call it at one place in their loops. A newcomer begins its loop there, so all
        that is carried, such as a scheduler, has moved on before, and calls that need every member
        stand after it. With local steps, overlap or a GradScaler it does nothing.

        Returns:
            True if members changed: ``rank``, ``size`` and ``committed_step`` may be others.

        Raises:
            CrewError: Too few workers are left, or the store is gone.
            CheckpointError: An exception cut the commit of a step short here.
            StepError: Settings, steps or parameters of members differ.
        """
        optimizer = None if self._optimizer is None else self._optimizer()
        return optimizer is not None and optimizer.admit()

    def optimizer(
        self,
        params: ParamsT,
        *args: Any,
        carry: Mapping[str, Carried] | None = None,
        buffers: Iterable[Tensor] = (),
        retry: bool = False,
        **options: Any,
    ) -> CrewLion:
        """Make the optimizer of this worker, and wait until the first epoch is formed.

        Args:
            params: As for ``DistributedLion``.
            *args: As for ``DistributedLion``.
            carry: By name, objects whose state a newcomer takes from the most advanced worker, and
                that exist before the optimizer, such as a sampler; all workers give the same names.
                A scheduler is passed to ``carry()`` once it is made.
            buffers: Tensors that a newcomer takes from it too, such as ``model.buffers()``.
            retry: True: where members change, ``step()`` votes again with the same gradients until
                the step is done. For the trainers of frameworks, which ignore what it returns.
            **options: As for ``DistributedLion``, except ``process_group``, ``nodes`` and
                ``momentum_sync``.

        Raises:
            InvalidArgumentError: The crew has an optimizer already, or cannot have this option.
            UnsupportedTypeError: Parameters are DTensors, or something has no state to carry.
            CrewError: Fewer than ``min_workers`` came in time, or a param group has a value that
                cannot be carried.
        """
        if self._optimizer is not None:
            raise InvalidArgumentError("a crew has one optimizer; give it all parameters")
        check_retry(retry, options)
        self.carry(**(carry or {}))
        donor = Donor(
            self._membership.rendezvous,
            rate_bit_per_s=self._handover_rate,
            replay_steps=self._replay_steps,
        )
        kind = RetryingLion if retry else CrewLion
        optimizer = kind.with_stages(
            [donor], self._membership, params, *args, buffers=buffers, **options
        )
        self._begin(optimizer)
        return optimizer

    def local_steps(
        self,
        inner: Inner,
        *,
        carry: Mapping[str, Carried] | None = None,
        buffers: Iterable[Tensor] = (),
        **options: Any,
    ) -> CrewLocalSteps:
        """Make the ``LocalSteps`` of this worker, and wait until the first epoch is formed.

        Members change at votes. Survivors vote again with the deltas that they still have. A worker
        that is new, or has missed votes, takes the common point, the outer momentum and the step
        counts from the most advanced worker. It abstains from that vote, and begins a period with
        the others.

        Args:
            inner: As for ``LocalSteps``; a newcomer's inner optimizer begins without state.
            carry: As for ``optimizer``.
            buffers: Likewise.
            **options: As for ``LocalSteps``, except ``process_group`` and ``nodes``.
                ``Timeouts.busy_s`` must cover the time between workers' arrivals at a vote.

        Raises:
            InvalidArgumentError: The crew has an optimizer already, or cannot have this option.
            UnsupportedTypeError: Parameters are DTensors.
            CrewError: Fewer than ``min_workers`` came in time.
        """
        if self._optimizer is not None:
            raise InvalidArgumentError("a crew has one optimizer; give it all parameters")
        if isinstance(self._membership.lanes, Lanes):
            raise InvalidArgumentError(
                "local_steps() cannot be used where members have several processes: the outer "
                "state of shards would have to come and go with them; use crew.optimizer()"
            )
        self.carry(**(carry or {}))
        optimizer = CrewLocalSteps(self._membership, inner, buffers=buffers, **options)
        self._begin(optimizer.point)
        return optimizer

    def _begin(self, optimizer: CrewLion) -> None:
        self._optimizer = weakref.ref(optimizer)
        optimizer.form(())

    def carry(self, **carried: Carried) -> None:
        """Let newcomers take the state of these objects from the most advanced worker.

        A newcomer makes its scheduler after its optimizer has joined; this call loads its state.
        """
        has_taken = self._membership.carried.add(carried)
        optimizer = None if self._optimizer is None else self._optimizer()
        if has_taken and optimizer is not None:
            optimizer.take_donor_groups()  # a new scheduler has set its first rate

    def finish(self) -> None:
        """Wait until all members have finished; a lagging member gets its last step here.

        The schedulers of such a member are one call of ``scheduler.step()`` ahead at the end: it
        takes their state from a member that has finished, and its own loop then calls them again.
        If you save them, save those of ``crew.rank`` 0.

        A member that is alone at the end logs a warning after ``wait_timeout_s``. One that finishes
        while the others vote on logs another one, and they go on without it.

        Raises:
            CrewError: The store is gone.
        """
        membership = self._membership
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or not membership.has_epoch or membership.ended.is_set():
            return
        try:
            while not self._have_all_finished(optimizer):
                if optimizer.is_left_out():
                    logger.warning(
                        "worker %d has finished at step %d, and the others train on without it; "
                        "give all members as many steps",
                        membership.id,
                        optimizer.committed_step,
                    )
                    membership.ended.set()
                    return  # the run is not over
                optimizer.form((), patience_s=optimizer.patience_s)
                optimizer.catch_up()
        except CrewError as error:
            if not isinstance(error.__cause__, TooFewError):
                raise
            logger.warning("worker %d has finished, the last of all: %s", membership.id, error)
        membership.ended.set()
        membership.rendezvous.close()

    def _have_all_finished(self, optimizer: CrewLion) -> bool:
        """Wait for the other members, and for a store that is away.

        Raises:
            CrewError: The store stays away.
        """
        rendezvous, silence_s = self._membership.rendezvous, self._membership.silence_s
        why = f"it has finished at step {optimizer.committed_step}"
        while True:
            # Nobody waits in a step for a member that never comes back.
            absence_s = self._membership.step_s if rendezvous.was_away else 0.0
            try:
                self._membership.changes.tell_end(why)
                optimizer.announce_end(why)
                return have_all_finished(
                    self.epoch, optimizer, silence_s=silence_s, absence_s=absence_s
                )
            except DistError as error:
                try:
                    was_away = rendezvous.await_back(error)
                except CrewError as gone:
                    raise CrewError(
                        f"{gone}; this worker has finished, and cannot know whether the others have"
                    ) from gone
                # One that was silent for as long as this worker waits may answer again by now.
                if not was_away and not isinstance(error, DistStoreError):
                    raise rendezvous.make_gone_error(error) from error

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish, or after an error leave, so that the others go on without this worker."""
        try:
            if error is None:
                self.finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        membership = self._membership
        membership.ended.set()
        if error is not None:
            membership.changes.say_goodbye(error)
            membership.lanes.leave(name_error(error))
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            optimizer.leave(None if error is None else name_error(error))
        elif self._optimizer is not None:  # freed, and the group of its epoch is not
            membership.lanes.disconnect(membership.lanes.alone, has_failed=False)
        membership.rendezvous.end()
