"""Play many schedules, or tell the story of one.

PYTHONPATH=tests:campaigns python -m simulation --seeds 10000
PYTHONPATH=tests:campaigns python -m simulation --seed 17
PYTHONPATH=tests:campaigns python -m simulation --crews --seeds 10000
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from simulation.campaign import Tally, describe, describe_failure, run_campaign
from simulation.crews.plan import (
    CrewPlan,
    draw_crew_plan,
    draw_join_plan,
    draw_machine_plan,
    draw_outage_plan,
)
from simulation.crews.play import play_crew
from simulation.crews.rules import find_crew_violations
from simulation.plan import draw_plan
from simulation.play import play
from simulation.rules import find_violations


def main() -> int:
    """Return 0 where every schedule went as it must."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="tell the story of one schedule instead")
    parser.add_argument("--crews", action="store_true", help="schedules of crews")
    parser.add_argument("--joins", action="store_true", help="of crews that newcomers join")
    parser.add_argument("--machines", action="store_true", help="of workers of several processes")
    parser.add_argument("--outages", action="store_true", help="of crews that lose their store")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seed is not None:
        if arguments.machines:
            return tell_crew(draw_machine_plan(arguments.seed))
        if arguments.outages:
            return tell_crew(draw_outage_plan(arguments.seed))
        if arguments.joins:
            return tell_crew(draw_join_plan(arguments.seed))
        if arguments.crews:
            return tell_crew(draw_crew_plan(arguments.seed))
        return tell(arguments.seed)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    started_s = time.monotonic()
    progress = Progress(len(seeds))
    tally = run_campaign(
        seeds,
        processes=arguments.processes,
        report=progress.show,
        of_crews=arguments.crews,
        joins=arguments.joins,
        machines=arguments.machines,
        outages=arguments.outages,
    )
    print(file=sys.stderr)
    print(describe(tally, time.monotonic() - started_s))
    return 1 if tally.failures or tally.schedules != len(seeds) else 0


class Progress:
    """One line that is overwritten, and one that stays for each schedule that fails.

    Args:
        schedules: How many there will be.
    """

    def __init__(self, schedules: int) -> None:
        self._schedules = schedules
        self._told: set[int] = set()

    def show(self, tally: Tally, seconds: float) -> None:
        """Show what there is so far."""
        for seed in sorted(set(tally.failures) - self._told):
            found = tally.failures[seed]
            text = describe_failure(seed, found, tally.option)
            print(f"\r{text}", file=sys.stderr)
            self._told.add(seed)
        rate = tally.schedules / max(seconds, 1e-9)
        text = f"{tally.schedules}/{self._schedules} schedules, {rate:.1f}/s"
        print(f"\r{text}, {len(tally.failures)} failed  ", end="", file=sys.stderr, flush=True)


def tell(seed: int) -> int:
    """Play one schedule and print all that happens in it."""
    plan = draw_plan(seed)
    outcome = play(plan)
    print(plan, *outcome.story, sep="\n")
    for rank, diary in enumerate(outcome.diaries):
        print(f"rank {rank} {diary.ending} after {diary.committed} steps")
    violations = find_violations(outcome)
    print(*(violations or ["all is as it must be"]), sep="\n")
    return 1 if violations else 0


def tell_crew(plan: CrewPlan) -> int:
    """Play one schedule of a crew and print all that happens in it."""
    outcome = play_crew(plan)
    print(outcome.plan, *outcome.story, sep="\n")
    for number, diary in outcome.diaries.items():
        epochs = [entry.number for entry in diary.entries]
        print(f"worker {number}, id {diary.id}: {diary.ending} {diary.error[0]}, epochs {epochs}")
    violations = find_crew_violations(outcome)
    print(*(violations or ["all is as it must be"]), sep="\n")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
