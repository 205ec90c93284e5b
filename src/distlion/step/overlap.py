"""Overlap with the backward pass: a bucket is sent as soon as its last gradient has arrived."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from distlion.errors import InvalidArgumentError
from distlion.failures import Status
from distlion.signals import LISTEN_S, deferred_signals
from distlion.step.arrivals import Arrivals
from distlion.step.bucket import Bucket, Completion, Pipeline, judge
from distlion.step.inputs import StepInputs
from distlion.step.lifecycle import Lifecycle
from distlion.step.streams import VotingStreams
from distlion.wire.frame import Header
from distlion.wire.verdict import Verdict, with_error, with_error_of

T = TypeVar("T")
Task = tuple["Future[Any]", Callable[[], Any]]


class Overlap:
    """The votes of one step that are under way while gradients still arrive.

    A bucket starts when its last gradient has arrived and all earlier buckets have started, so that
    all ranks issue their collectives in one order. They run on one thread, through a pipeline. The
    last bucket waits for ``finish`` and carries this worker's findings about all of them, so that
    all ranks raise the same error, or none.

    An optimizer has one for its whole life, so that a pause survives a change of buckets.

    Args:
        begin: Function called before the first bucket of a step, for the inputs of its buckets.
        lifecycle: The optimizer's lifecycle: once it is dead, no vote is sent.
    """

    def __init__(self, *, begin: Callable[[], StepInputs], lifecycle: Lifecycle) -> None:
        # Weak: the optimizer owns this object, and must be freed as soon as nobody else uses it.
        self._begin = weakref.WeakMethod(begin)
        self._lifecycle = lifecycle
        self._lock = threading.Lock()
        self._paused = False
        self._arrivals = Arrivals()
        self._tasks = _start_thread()
        self._hooks: dict[int, RemovableHandle] = {}
        # Once it is freed, neither hooks nor a thread remain.
        weakref.finalize(self, _end, self._hooks, self._tasks)

    def take(self, buckets: Sequence[Bucket], *, waits: bool) -> None:
        """Take new buckets, between two steps.

        Args:
            buckets: The buckets, in the order of their exchanges.
            waits: Whether all buckets wait for ``finish``. Violations of overlap's rules are
                detected all the same.
        """
        self._buckets, self._waits = buckets, waits
        self._places = {
            id(param.param): (param, number)
            for number, bucket in enumerate(buckets)
            for param in bucket.params
        }
        self._streams = VotingStreams([bucket.device for bucket in buckets])
        for key, (param, _) in self._places.items():
            if key not in self._hooks:
                self._hooks[key] = _register(param.param, weakref.ref(self))
                self._arrivals.remember(param)  # a first backward pass may add to it
        self._reset()

    def _reset(self) -> None:
        self._inputs: StepInputs | None = None
        self._pipeline = Pipeline[Bucket](at_once=True)
        self._n_started = 0
        self._last_task: Future[Any] | None = None
        self._arrivals.clear()
        self._addresses: dict[int, tuple[int, int]] = {}
        self._streams.forget()
        self._missing = [len(bucket.params) for bucket in self._buckets]

    def _begin_step(self) -> StepInputs:
        """Return the inputs of this step's buckets, gathered when the first of them starts."""
        if self._inputs is None:
            begin = self._begin()
            assert begin is not None  # its owner calls this, or waits in a backward pass
            self._inputs = begin()
        return self._inputs

    @property
    def has_begun(self) -> bool:
        """True if gradients of this step have arrived, so that votes may have been sent."""
        return bool(self._arrivals) or self._inputs is not None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let gradients accumulate without starting a bucket."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def note_arrival(self, key: int) -> None:
        """Note that a gradient is complete, and start the buckets that waited for it.

        Args:
            key: The ``id`` of its parameter.
        """
        if self._lifecycle.is_dead:
            return
        param, bucket = self._places[key]
        with self._lock:  # backward runs on a thread for each device
            if self._paused:
                self._arrivals.remember(param)
                return
            self._streams.note(bucket)
            if not self._arrivals.note(param):
                return
            self._addresses[key] = param.find_addresses()
            self._missing[bucket] -= 1
            if self._waits:
                self._begin_step()
                return
            last = len(self._buckets) - 1
            while self._n_started < last and self._missing[self._n_started] == 0:
                self._start()

    def _start(self) -> None:
        """Start the next bucket."""
        # Ctrl-C in a backward pass must not start a bucket twice, or without counting it.
        with deferred_signals("the start of a vote", gives_way=False):
            self._cast(self._n_started, self._begin_step())
            self._n_started += 1

    def _cast(self, number: int, inputs: StepInputs, completion: Completion | None = None) -> None:
        """Load and cast a bucket on the thread, once its gradients are computed."""
        bucket, pipeline, streams = self._buckets[number], self._pipeline, self._streams
        events = streams.mark(number)

        def cast() -> None:
            with streams.behind(events, number):
                bucket.load(inputs)
                pipeline.add(bucket.cast(inputs, completion))

        self._submit(cast)

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the thread; it fails if an earlier one has failed."""
        before, future = self._last_task, Future[T]()

        def run() -> T:
            if before is not None:
                before.result()
            return function()

        self._last_task = future
        self._tasks.put((future, run))
        return future

    def finish(self, now: StepInputs) -> tuple[StepInputs, Sequence[Bucket]]:
        """Start all remaining buckets, including the last one, and wait for all replies.

        Args:
            now: The inputs of buckets that would start now.

        Returns:
            The inputs that the buckets used, and the buckets.
        """
        try:
            with self._lock:
                if self._inputs is None:
                    self._inputs = now
                inputs, pipeline = self._inputs, self._pipeline
                while self._n_started < len(self._buckets) - 1:
                    self._start()
            self._cast(len(self._buckets) - 1, inputs, self._make_completion(inputs, now))
            return inputs, _await(self._submit(pipeline.drain))
        except BaseException:
            # The thread may still load buckets, which would keep gradients of a dead optimizer.
            self._tasks.put((Future(), self._clear))
            raise
        finally:
            self._reset()

    def _make_completion(self, inputs: StepInputs, now: StepInputs) -> Completion:
        """Put errors since the arrival of the first gradient into the last bucket's header."""
        seen, refused = self._arrivals.list_changed(), self._refuse_moved(inputs, now.header)
        sampled = self._arrivals.compare_samples(self._buckets[-1].device)
        settings_changed = inputs.header.settings != now.header.settings
        inputs.problems.extend(now.problems if now is not inputs else ())

        def complete(header: Header, flags: Tensor) -> Header:
            changed = [*seen, *sampled.list_changed(flags)]
            if changed:
                header = with_error(
                    header, Status.GRADIENT_CHANGED, culprit=inputs.rank, position=min(changed)
                )
            if settings_changed:
                header = with_error(header, Status.SETTINGS_CHANGED, culprit=inputs.rank)
            return with_error_of(header, refused)

        return Completion(sampled.flags, complete)

    def _refuse_moved(self, inputs: StepInputs, header: Header) -> Header:
        """Report in a header that a vote was encoded from memory that a commit must not write."""
        for key, before in self._addresses.items():
            param, _ = self._places[key]
            if param.find_addresses() != before:
                problem = InvalidArgumentError(
                    f"{param.name} or its momentum was replaced between backward and step(). With "
                    "overlap its vote has left by then: replace tensors after step()"
                )
                return inputs.refuse(header, problem)
        return header

    def cancel(self) -> tuple[StepInputs, Verdict]:
        """Complete the schedule of a step that this worker gives up, and tell all workers.

        Returns:
            The inputs of the buckets, and the verdict.
        """
        try:
            inputs, pipeline = self._begin_step(), self._pipeline
            given_up = with_error(
                inputs.header, Status.CANCELLED, culprit=inputs.rank, cancelled_by_all=True
            )
            rest = self._buckets[self._n_started :]

            def abstain_from_rest() -> list[Bucket]:
                for bucket in rest:
                    pipeline.add(bucket.abstain(given_up, inputs.coins, nonfinite=inputs.nonfinite))
                return pipeline.drain()

            buckets = _await(self._submit(abstain_from_rest))
            verdict = judge(buckets)
            by_all = buckets[-1].reply.verdict.cancelled_by_all
        finally:
            self.forget()
        # A worker may have voted on earlier buckets before it gave up.
        return inputs, replace(verdict, cancelled_by_all=by_all)

    def forget(self) -> None:
        """Forget all arrivals, for a step that is over or a group that is dead."""
        self._reset()
        self._clear()

    def _clear(self) -> None:
        for bucket in self._buckets:
            bucket.clear()


def _await(future: Future[T]) -> T:
    """Wait for a result, and hear signals within ``LISTEN_S``."""
    while not future.done():
        with suppress(futures.TimeoutError):
            future.exception(LISTEN_S)
    return future.result()


def _register(param: Tensor, overlap: weakref.ref[Overlap]) -> RemovableHandle:
    """Note the arrivals of a parameter's gradient, as long as the overlap lives.

    The hook holds only a number: a record would keep all momenta as long as the parameter lives.
    """
    key = id(param)

    @_disable_dynamo  # a compiled train step would trace the hooks of its backward pass
    def note(_: Tensor) -> None:
        found = overlap()
        if found is not None:
            found.note_arrival(key)

    register: Callable[..., RemovableHandle] = param.register_post_accumulate_grad_hook
    return register(note)


def _end(hooks: Mapping[int, RemovableHandle], tasks: queue.SimpleQueue[Task | None]) -> None:
    for handle in hooks.values():
        handle.remove()
    tasks.put(None)


def _start_thread() -> queue.SimpleQueue[Task | None]:
    """Start a thread that runs tasks in order, up to a None."""
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    threading.Thread(target=_run, args=(tasks,), name="distlion votes", daemon=True).start()
    return tasks


def _run(tasks: queue.SimpleQueue[Task | None]) -> None:
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            future, function = task
            try:
                future.set_result(function())
            # Whatever it is, the waiting thread raises it.
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            del task, future, function
