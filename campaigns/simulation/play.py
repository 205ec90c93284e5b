"""One schedule, from its seed to what became of every worker."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import distlion.wire.gloo
from distlion.errors import IdenticalGradientsWarning
from simulation.distributed import Distributed
from simulation.faults import Injector
from simulation.groups import End
from simulation.kernel import DeadlockError, Kernel, active
from simulation.network import Machine, Network
from simulation.plan import Fault, Plan
from simulation.stand_ins import installed
from simulation.worker import Diary, Worker, come_back

LIMIT_S = 600.0
"""Virtual seconds; no schedule comes near."""


@dataclass
class Outcome:
    """What became of a schedule.

    Attributes:
        plan: What was played.
        diaries: Of each worker.
        fired: The faults that struck, and when.
        newcomers: Of workers that came back.
        trouble: What went wrong with the schedule as a whole.
        machines: The processes.
        virtual_s: How long it took in virtual time.
        n_events: Events.
        story: What happened, line by line.
    """

    plan: Plan
    diaries: list[Diary]
    fired: list[tuple[Fault, float]] = field(default_factory=list)
    newcomers: list[Diary] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)
    virtual_s: float = 0.0
    n_events: int = 0
    story: list[str] = field(default_factory=list)

    @property
    def store_host(self) -> int:
        """The rank that keeps the store; -1 for none of them."""
        return -1 if self.plan.has_agent else 0


class Play:
    """One schedule.

    Args:
        plan: What is played.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kernel = Kernel(plan.seed, LIMIT_S)
        self._network = Network(self._kernel, plan.size, plan.delays, has_agent=plan.has_agent)
        self._outcome = Outcome(plan, [Diary() for _ in range(plan.size)])
        self._left = set(range(plan.size))
        self._newcomers: list[Machine] = []
        self._injector = Injector(
            self._network, plan, restart=self._restart, give_up=self._left.discard
        )
        self._distributed = Distributed(self._network)

    def run(self) -> Outcome:
        """Play it."""
        kernel, outcome = self._kernel, self._outcome
        active.append(kernel)
        try:
            with installed(self._distributed), _quiet(self._plan):
                self._start()
                try:
                    kernel.run_until(lambda: not self._left)
                except DeadlockError as error:
                    outcome.trouble.append(f"{error}; unfinished: {sorted(self._left)}")
                outcome.virtual_s, outcome.n_events = kernel.now_s, kernel.n_events
                kernel.close([*self._network.machines, *self._newcomers])
        finally:
            active.pop()
        outcome.trouble += kernel.trouble
        outcome.story = kernel.story
        outcome.fired, outcome.machines = self._injector.fired, self._network.machines
        for machine, diary in zip(outcome.machines, outcome.diaries, strict=True):
            if not diary.ending:
                diary.ending = "stopped" if machine.stopped_until_s else "died"
        return outcome

    def _start(self) -> None:
        plan, network = self._plan, self._network
        ranks = tuple(range(plan.size))
        for machine in network.machines:
            End(network, machine, "world", ranks=ranks, timeout_s=plan.transport_s)
        for machine in network.machines:
            diary = self._outcome.diaries[machine.rank]
            worker = Worker(plan, network, machine, injector=self._injector, diary=diary)

            def live(worker: Worker = worker, machine: Machine = machine) -> None:
                try:
                    worker.live()
                finally:
                    self._left.discard(machine.rank)

            self._kernel.spawn(machine, "main", live)

    def _restart(self, machine: Machine, after_s: float) -> None:
        newcomer, diary = Machine(f"{machine.name}, again", rank=machine.rank), Diary()
        self._newcomers.append(newcomer)
        self._outcome.newcomers.append(diary)
        number = -len(self._newcomers)
        self._left.add(number)

        def live() -> None:
            try:
                self._kernel.sleep(after_s)
                come_back(self._plan, self._distributed, diary)
            finally:
                self._left.discard(number)

        self._kernel.spawn(newcomer, "main", live)


def play(plan: Plan) -> Outcome:
    """Play a schedule."""
    return Play(plan).run()


def without_faults(plan: Plan) -> Plan:
    """Return the same training where nothing goes wrong but what workers do on purpose."""
    given_up = tuple(fault for fault in plan.faults if fault.kind == "give up")
    return replace(plan, faults=given_up)


@contextlib.contextmanager
def _quiet(plan: Plan) -> Iterator[None]:
    """Let the package expect workers, say nothing, and send to all at once up to a size."""
    logger = logging.getLogger("distlion")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.dict(os.environ, WORLD_SIZE=str(plan.size)),
            mock.patch.object(distlion.wire.gloo, "MOST_BYTES_AT_ONCE", plan.most_at_once),
            mock.patch.object(distlion.wire.gloo, "LEAST_BYTES_TO_MEET", plan.least_to_meet),
        ):
            warnings.simplefilter("ignore", IdenticalGradientsWarning)
            yield
    finally:
        logger.setLevel(level)
