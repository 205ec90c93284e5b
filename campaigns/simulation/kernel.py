"""Tasks that take turns in an order drawn from a seed, and a clock that jumps between events."""

from __future__ import annotations

import functools
import gc
import heapq
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Killed(BaseException):
    """Unwinds the tasks of a process that is gone; nothing in the package may catch it for good."""


class DeadlockError(AssertionError):
    """Every task waits, and nothing will ever wake one of them."""


@dataclass(eq=False)
class Process:
    """One simulated process.

    Attributes:
        name: For stories.
        is_gone: Whether it has ended, in whatever way.
        stopped_until_s: Until when none of its tasks runs; in the past for one that runs.
        paused_s: Seconds it was stopped, or computed, since ``note_progress`` was called.
        progress_s: When it last began or ended something.
        at_exit: What it does before it ends.
        tasks: Its tasks that have not ended.
    """

    name: str
    is_gone: bool = False
    stopped_until_s: float = 0.0
    paused_s: float = 0.0
    progress_s: float = 0.0
    at_exit: list[Callable[[], Any]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)


@dataclass(eq=False)
class Task:
    """A thread of a process; it runs only while it has the baton."""

    process: Process
    name: str
    baton: threading.Lock = field(default_factory=threading.Lock)
    ticket: int = 0
    was_woken: bool = False
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.baton.acquire()


class Kernel:
    """The clock, the events and the tasks of one schedule.

    Exactly one task runs at a time. One that waits hands over to whichever the next event wakes, so
    that a schedule is the same whenever it is played from the same seed.

    Args:
        seed: Of the order of events at one instant, and of whatever asks ``random``.
        limit_s: Virtual seconds after which a schedule counts as hanging.
    """

    def __init__(self, seed: int, limit_s: float) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.is_over = False
        self.n_events = 0
        self.trouble: list[str] = []
        self.story: list[str] = []
        self._limit_s = limit_s
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._driver = Task(Process("driver"), "driver")
        self._next: Task | None = None
        self._stuck: str | None = None
        self._threads: list[threading.Thread] = []
        self._is_done: Callable[[], bool] = lambda: False
        self.current = self._driver

    def tell(self, process: Process, text: str) -> None:
        """Note an event, for whoever replays the schedule."""
        self.story.append(f"{self.now_s:9.4f} s  {process.name:8s} {text}")

    def call_at(self, time_s: float, action: Callable[[], None]) -> None:
        """Let something happen; what happens at one instant does so in an order drawn here.

        Where it calls itself once more, give a method and not a nested function: that one would be
        a circle, of which a schedule makes a hundred thousand, and which only a collection frees.
        """
        if not self.is_over:
            entry = (time_s, self.random.random(), next(self._numbers), action)
            heapq.heappush(self._events, entry)

    def spawn(self, process: Process, name: str, function: Callable[[], None]) -> Task:
        """Start a task of a process; its first turn comes by itself."""
        task = Task(process, name)
        process.tasks.append(task)

        def run() -> None:
            task.baton.acquire()
            try:
                if not process.is_gone:
                    function()
            except Killed:
                pass
            except BaseException as error:
                self.trouble.append(f"{process.name}, {name}: {type(error).__name__}: {error}")
            task.has_ended = True
            process.tasks.remove(task)
            self._hand_over(self._dispatch())

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        self._resume_at(self.now_s, task, task.ticket, woken=True)
        return task

    def wait(self, deadline_s: float | None = None) -> bool:
        """Let others run until ``wake`` is called for this task; False at the deadline."""
        task = self.current
        self.check_alive()
        if deadline_s is not None:
            self._resume_at(deadline_s, task, task.ticket, woken=False)
        following = self._dispatch()
        if following is not task:
            self._hand_over(following)
            task.baton.acquire()
        task.ticket += 1
        self.check_alive()
        return task.was_woken

    def wake(self, task: Task) -> None:
        """End the present wait of a task."""
        self._resume_at(self.now_s, task, task.ticket, woken=True)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the task that runs."""
        self.wait(self.now_s + max(0.0, seconds))

    def check_alive(self) -> None:
        """Raise Killed in a task whose process is gone."""
        if self.current.process.is_gone:
            raise Killed

    def end_process(self, process: Process) -> None:
        """Take a process away; its tasks unwind when it is their turn."""
        process.is_gone = True
        process.stopped_until_s = 0.0
        for task in process.tasks:
            if task is not self.current:
                self.wake(task)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Let tasks run from the driver, until ``is_done``, which events may change.

        Raises:
            DeadlockError: That cannot happen any more, or not within the limit.
        """
        while not is_done():
            self._next = None
            following = self._dispatch(is_done)
            if following is not self._driver:
                self._hand_over(following)
                self._driver.baton.acquire()
            self.current = self._driver
            if self._stuck is not None:
                raise DeadlockError(self._stuck)

    def close(self, processes: list[Process]) -> None:
        """Unwind all tasks that are left, so that no thread outlives the schedule."""
        self._stuck, self._limit_s = None, float("inf")
        self._events.clear()
        for process in processes:
            self.end_process(process)
        self.run_until(lambda: not any(process.tasks for process in processes))
        self.is_over = True
        for thread in self._threads:
            thread.join()

    def _resume_at(self, time_s: float, task: Task, ticket: int, *, woken: bool) -> None:
        self.call_at(time_s, functools.partial(self._resume, task, ticket, woken))

    def _resume(self, task: Task, ticket: int, woken: bool) -> None:
        if task.has_ended or ticket != task.ticket:
            return
        if task.process.stopped_until_s > self.now_s:
            self._resume_at(task.process.stopped_until_s, task, ticket, woken=woken)
            return
        task.was_woken = woken
        self._next = task

    def _dispatch(self, is_done: Callable[[], bool] | None = None) -> Task:
        """Let events happen until one of them wakes a task; return that task."""
        if is_done is not None:
            self._is_done = is_done
        self._next = None
        while self._next is None:
            if self._is_done():
                return self._driver
            if not self._events or self._events[0][0] > self._limit_s:
                left = "no event is left" if not self._events else f"after {self._limit_s:g} s"
                self._stuck = f"hangs: {left}"
                return self._driver
            self.now_s, _, _, action = heapq.heappop(self._events)
            self.n_events += 1
            action()
        return self._next

    def _hand_over(self, task: Task) -> None:
        self.current = task
        task.baton.release()


active: list[Kernel] = []
"""The kernel of the schedule that is being played, if any."""


def running() -> Kernel:
    """Return the kernel of the schedule that is being played."""
    return active[-1]


@functools.cache
def leave_imports_alone() -> None:
    """Keep collections from looking at what was imported: each would take as long as a schedule.

    Call it after a schedule, as the first one imports much. It acts once in a process: what is
    frozen is never collected, and garbage of schedules has to be.
    """
    gc.collect()
    gc.freeze()
