"""After every schedule of a crew whose workers have several processes, all is as it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.campaign import describe, play_seeds
from simulation.crews.plan import CrewFault, draw_machine_plan
from simulation.crews.play import play_crew
from simulation.crews.rules import find_crew_violations

QUICK, MANY = range(3, 4), range(100, 250)


def test_a_few_schedules_of_machines_keep_all_rules() -> None:
    found = play_seeds(QUICK, machines=True)
    assert not found.failures, describe(found, 0.0)


@pytest.mark.slow
def test_many_schedules_of_machines_keep_all_rules() -> None:
    found = play_seeds(MANY, machines=True)
    assert not found.failures, describe(found, 0.0)


@pytest.mark.slow
def test_machine_whose_process_dies_is_left_out_wherever_that_happens() -> None:
    plan = replace(
        draw_machine_plan(0),
        starts_s=(0.0, 0.0, 0.0),
        comings=(),
        min_workers=2,
        max_workers=None,
        rules=("majority",),
        sizes=(65,),
        goal=2,
        lanes=2,
        compute_s=0.1,
    )
    n_struck = 0
    for victim, after in ((0, 20), (1, 45), (3, 60)):
        fault = CrewFault("die", victim, "forming", 0, after)
        outcome = play_crew(replace(plan, faults=(fault,)))
        assert find_crew_violations(outcome) == []
        n_struck += len(outcome.fired)
        endings = [outcome.diaries[number].ending for number in range(6)]
        assert endings[victim] == "died"
        whole = [number for number in range(6) if number // 2 != victim // 2]
        assert {endings[number] for number in whole} == {"finished"}
    assert n_struck == 3
