"""One schedule of a crew, from its seed to what became of every worker."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from distlion.crew import replies
from distlion.errors import IdenticalGradientsWarning
from simulation.crews.distributed import CrewDistributed
from simulation.crews.faults import CrewInjector
from simulation.crews.network import CrewMachine, CrewNetwork, CrewStore
from simulation.crews.plan import CrewFault, CrewPlan
from simulation.crews.worker import CrewDiary, CrewWorker
from simulation.distributed import PrefixStore
from simulation.groups import End
from simulation.kernel import DeadlockError, Kernel, active, leave_imports_alone
from simulation.network import Machine
from simulation.stand_ins import installed

LIMIT_S = 300.0
"""Virtual seconds; who has no end by then has none."""

PIECE_BYTES = 256
"""Of the pieces in which a newcomer gets parameters."""

MEET_S = 30.0
"""Seconds that a worker's processes wait for each other."""

LINGERS_S = (0.0, 0.0, 0.5, 200.0)
"""How long a process may live on after its script has ended."""


@dataclass
class CrewOutcome:
    """What became of a schedule.

    Attributes:
        plan: What was played.
        diaries: Of each worker that came, by its number.
        fired: The faults that struck, and when.
        trouble: What went wrong with the schedule as a whole.
        is_stuck: Whether some worker had no end.
        virtual_s: How long it took in virtual time.
        n_events: Events.
        story: What happened, line by line.
    """

    plan: CrewPlan
    diaries: dict[int, CrewDiary] = field(default_factory=dict)
    fired: list[tuple[CrewFault, float]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    is_stuck: bool = False
    virtual_s: float = 0.0
    n_events: int = 0
    story: list[str] = field(default_factory=list)


class CrewPlay:
    """One schedule.

    Args:
        plan: What is played.
    """

    def __init__(self, plan: CrewPlan) -> None:
        self._plan = plan
        self._kernel = Kernel(plan.seed, LIMIT_S)
        self._network = CrewNetwork(self._kernel, plan.delays)
        self._distributed = CrewDistributed(self._network)
        self._outcome = CrewOutcome(plan)
        self._left: set[int] = set()
        self._kept: list[object] = []
        self._coming = list(enumerate(plan.comings, start=len(plan.starts_s)))
        self._injector = CrewInjector(
            self._network, plan, restart=self._restart, give_up=self._give_up
        )
        chance = random.Random(plan.seed)
        self._boxes: list[list[int]] = []
        for number in range(plan.n_workers):
            skew_s = chance.uniform(-plan.skew_s, plan.skew_s)
            self._add_worker(f"worker {number}", skew_s)

    def _add_worker(self, name: str, skew_s: float) -> list[int]:
        """Add the processes of a worker."""
        lanes = self._plan.lanes
        names = [name] if lanes == 1 else [f"{name}.{lane}" for lane in range(lanes)]
        box = [self._network.add_machine(each, skew_s).rank for each in names]
        self._boxes.append(box)
        return box

    def run(self) -> CrewOutcome:
        """Play it."""
        kernel, outcome = self._kernel, self._outcome
        active.append(kernel)
        try:
            with installed(self._distributed), _quiet(), _small_pieces():
                for number, start_s in enumerate(self._plan.starts_s):
                    self._start_all(self._boxes[number], start_s)
                try:
                    kernel.run_until(lambda: not self._left)
                except DeadlockError as error:
                    outcome.is_stuck = True
                    kernel.tell(kernel._driver.process, str(error))
                outcome.virtual_s, outcome.n_events = kernel.now_s, kernel.n_events
                for number in self._left if outcome.is_stuck else ():
                    outcome.diaries[number].ending = "has no end"
                stopped = {
                    machine.rank for machine in self._network.machines if machine.stopped_until_s
                }
                kernel.close(list(self._network.machines))
        finally:
            active.pop()
        for number, diary in outcome.diaries.items():
            if not diary.ending:
                diary.ending = "stopped" if number in stopped else "died"
        outcome.trouble += kernel.trouble
        outcome.story, outcome.fired = kernel.story, self._injector.fired
        self._forget()
        return outcome

    def _forget(self) -> None:
        """Let go of all: a transfer without an end is kept for ever, and would keep the rest."""
        self._kept.clear()
        self._network.streams.clear()
        self._network.listeners.clear()
        for machine in map(self._machine, range(len(self._network.machines))):
            for end in machine.groups.values():
                vars(end).clear()
            machine.groups.clear()
            machine.world = None  # it keeps its watch, which knows the machine

    def _machine(self, number: int) -> CrewMachine:
        machine = self._network.machines[number]
        assert isinstance(machine, CrewMachine)
        return machine

    def _start_all(self, box: list[int], after_s: float) -> None:
        for number in box:
            self._start(self._machine(number), after_s)

    def _find_box(self, machine: Machine) -> list[int]:
        return next(box for box in self._boxes if machine.rank in box)

    def _meet(self, machine: CrewMachine) -> End | None:
        """Make the group of a worker's processes."""
        box = self._find_box(machine)
        if len(box) == 1:
            return None
        store = CrewStore(self._network, machine, MEET_S)
        self._distributed.init_process_group(
            "gloo",
            store=PrefixStore(f"machine of {box}", store),
            rank=box.index(machine.rank),
            world_size=len(box),
            timeout=timedelta(seconds=MEET_S),
        )
        assert isinstance(machine.world, End)
        return machine.world

    def _end_siblings(self, machine: CrewMachine) -> None:
        """End the other processes of a worker, as its launcher does."""
        for number in self._find_box(machine):
            other = self._machine(number)
            if other is not machine and not other.is_gone:
                self._network.end(other, is_crash=True)
                self._left.discard(number)

    def _start(self, machine: CrewMachine, after_s: float) -> None:
        kernel, number = self._kernel, machine.rank
        diary = self._outcome.diaries[number] = CrewDiary(number)
        self._left.add(number)
        worker = CrewWorker(
            self._plan,
            kernel,
            machine,
            injector=self._injector,
            diary=diary,
            keep=self._kept.append,
            on_step=self._let_come,
            meet=partial(self._meet, machine),
        )

        def live() -> None:
            try:
                kernel.sleep(after_s)
                worker.live()
            finally:
                self._left.discard(number)
            if diary.ending != "finished":
                self._end_siblings_later(machine)
            kernel.spawn(machine, "others", linger)

        def linger() -> None:
            kernel.sleep(kernel.random.choice(LINGERS_S))
            for function in list(machine.at_exit):
                function()
            self._network.end(machine, is_crash=False)

        kernel.spawn(machine, "main", live)

    def _let_come(self, step: int) -> None:
        for number, coming in list(self._coming):
            if coming.at_step <= step:
                self._coming.remove((number, coming))
                self._start_all(self._boxes[number], coming.after_s)

    def _restart(self, machine: CrewMachine, after_s: float) -> None:
        self._end_siblings(machine)
        self._start_all(self._add_worker(f"{machine.name}, again", machine.clock_skew_s), after_s)

    def _give_up(self, machine: CrewMachine) -> None:
        self._left.discard(machine.rank)
        if machine.is_gone:
            self._end_siblings_later(machine)

    def _end_siblings_later(self, machine: CrewMachine) -> None:
        """Let the launcher see that a process is gone, or not before the others have ended."""
        if self._plan.lanes > 1:
            after_s = self._kernel.random.choice((0.1, 1.0, 30.0))
            self._kernel.call_at(self._kernel.now_s + after_s, partial(self._end_siblings, machine))


def play_crew(plan: CrewPlan) -> CrewOutcome:
    """Play a schedule; garbage, whose end wakes threads, is collected before and after it."""
    gc.collect()
    gc.disable()
    try:
        return CrewPlay(plan).run()
    finally:
        gc.enable()
        leave_imports_alone()


@contextlib.contextmanager
def _small_pieces() -> Iterator[None]:
    """Cut even small models into several pieces."""
    before, replies.PIECE_BYTES = replies.PIECE_BYTES, PIECE_BYTES
    try:
        yield
    finally:
        replies.PIECE_BYTES = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("distlion", "torch.distributed")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IdenticalGradientsWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
