"""Many schedules: played in a few processes, checked, counted and summed up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import torch

from simulation.crews.plan import (
    draw_crew_plan,
    draw_join_plan,
    draw_machine_plan,
    draw_outage_plan,
)
from simulation.crews.play import CrewOutcome, play_crew
from simulation.crews.rules import find_crew_violations
from simulation.kernel import leave_imports_alone
from simulation.plan import draw_plan
from simulation.play import Outcome, play
from simulation.rules import find_violations

BATCH = 50
BATCHES_OF_A_PROCESS = 10
"""Schedules that a process plays between two reports."""


@dataclass
class Tally:
    """What a number of schedules came to.

    Attributes:
        schedules: How many.
        worker_steps: Steps that were committed, added over workers.
        fired: Faults that struck, by kind.
        endings: Of workers, by kind: with the class of the error where one ended it.
        recovered: Errors after which all went on, by class.
        epochs: Epochs of crews, added over workers.
        quiet: Schedules in which no fault struck.
        failures: By seed, what was not as it must be.
        option: The option of the command line with which such schedules are played.
    """

    schedules: int = 0
    worker_steps: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    recovered: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    quiet: int = 0
    failures: dict[int, list[str]] = field(default_factory=dict)
    option: str = ""

    def add_outcome(self, outcome: Outcome, violations: list[str]) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.quiet += not outcome.fired
        self.fired.update(fault.kind for fault, _ in outcome.fired)
        for diary in (*outcome.diaries, *outcome.newcomers):
            fatal = diary.fatal
            self.endings[diary.ending if fatal is None else fatal.kind] += 1
            self.recovered.update(raised.kind for raised in diary.raised if raised.is_recoverable)
            self.worker_steps += diary.committed
        if violations:
            self.failures[outcome.plan.seed] = violations

    def add_crew(self, outcome: CrewOutcome, violations: list[str]) -> None:
        """Count one schedule of a crew."""
        self.schedules += 1
        self.quiet += not outcome.fired
        self.fired.update(fault.kind for fault, _ in outcome.fired)
        for diary in outcome.diaries.values():
            self.endings[diary.error[0] or diary.ending] += 1
            self.epochs += len(diary.entries)
            self.worker_steps += len(diary.commits)
        if violations:
            self.failures[outcome.plan.seed] = violations

    def add(self, other: Tally) -> None:
        """Add what another process has counted."""
        self.schedules += other.schedules
        self.worker_steps += other.worker_steps
        self.epochs += other.epochs
        self.quiet += other.quiet
        self.fired.update(other.fired)
        self.endings.update(other.endings)
        self.recovered.update(other.recovered)
        self.failures.update(other.failures)
        self.option = other.option


def play_seeds(
    seeds: Sequence[int],
    *,
    of_crews: bool = False,
    joins: bool = False,
    machines: bool = False,
    outages: bool = False,
) -> Tally:
    """Play and check schedules, one after the other, in this process.

    Args:
        seeds: Of the schedules.
        of_crews: Whether they are schedules of crews.
        joins: Of crews in which newcomers catch up with a donor.
        machines: Of crews whose workers have several processes.
        outages: Of crews that lose their store, and find an empty one.
    """
    draws = (
        (outages, "--outages", draw_outage_plan),
        (machines, "--machines", draw_machine_plan),
        (joins, "--joins", draw_join_plan),
        (of_crews, "--crews", draw_crew_plan),
    )
    option, draw_crew = next(((name, draw) for is_it, name, draw in draws if is_it), ("", None))
    tally = Tally(option=option)
    for seed in seeds:
        if draw_crew is not None:
            crew = play_crew(draw_crew(seed))
            tally.add_crew(crew, find_crew_violations(crew))
        else:
            outcome = play(draw_plan(seed))
            tally.add_outcome(outcome, find_violations(outcome))
            leave_imports_alone()
    return tally


def run_campaign(
    seeds: Sequence[int],
    *,
    processes: int,
    report: Callable[[Tally, float], None],
    of_crews: bool = False,
    joins: bool = False,
    machines: bool = False,
    outages: bool = False,
) -> Tally:
    """Play schedules in several processes.

    Args:
        seeds: Of the schedules.
        processes: How many processes; 1 plays them here.
        report: Called now and then with what there is so far, and the seconds it took.
        of_crews: Whether they are schedules of crews.
        joins: As for ``play_seeds``.
        machines: Likewise.
        outages: Likewise.
    """
    started_s, total = time.monotonic(), Tally()
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    play_batch = partial(
        play_seeds, of_crews=of_crews, joins=joins, machines=machines, outages=outages
    )
    for tally in _play_batches(batches, processes, play_batch):
        total.add(tally)
        report(total, time.monotonic() - started_s)
    return total


def _play_batches(
    batches: Sequence[Sequence[int]], processes: int, play_batch: Callable[[Sequence[int]], Tally]
) -> Iterator[Tally]:
    if processes == 1:
        yield from map(play_batch, batches)
        return
    # What schedules leave behind makes a process twice as slow after a few thousand of them.
    n_at_once = processes * BATCHES_OF_A_PROCESS
    for start in range(0, len(batches), n_at_once):
        # Not forks: torch may have threads already.
        with ProcessPoolExecutor(
            processes, mp_context=get_context("spawn"), initializer=_prepare
        ) as pool:
            yield from pool.map(play_batch, batches[start : start + n_at_once])


def _prepare() -> None:
    torch.set_num_threads(1)


def describe(tally: Tally, seconds: float) -> str:
    """Write a summary of a few lines."""
    steps_per_s = tally.worker_steps / max(seconds, 1e-9)
    lines = [
        f"{tally.schedules} schedules in {seconds:.0f} s: "
        f"{tally.schedules / max(seconds, 1e-9):.1f} schedules/s, "
        f"{steps_per_s:.0f} committed steps of workers/s",
        f"faults that struck: {_list(tally.fired)}; none in {tally.quiet} schedules",
        f"endings of workers: {_list(tally.endings)}",
        f"errors that all went on after: {_list(tally.recovered)}",
        f"{len(tally.failures)} schedules failed",
    ]
    if tally.epochs:
        lines.insert(1, f"epochs that workers entered: {tally.epochs}")
    lines += [
        describe_failure(seed, found, tally.option)
        for seed, found in sorted(tally.failures.items())
    ]
    return "\n".join(lines)


def describe_failure(seed: int, violations: list[str], option: str) -> str:
    """Write what went wrong in a schedule, and the command that plays it again."""
    lines = [f"seed {seed}: {violations[0]}", *violations[1:4]]
    more = f" ARGS={option}" if option else ""
    return "\n    ".join([*lines, f"replay it: make simulate SEED={seed}{more}"])


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"
