"""After every schedule, all is as it must be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

import distlion
from distlion.wire.turns import LONG_S
from simulation import rules
from simulation.campaign import BATCH, Tally, describe, play_seeds
from simulation.crews.plan import KINDS, draw_crew_plan
from simulation.crews.play import play_crew
from simulation.distributed import Distributed
from simulation.kernel import Kernel
from simulation.network import Delays, Network
from simulation.plan import FIRST_DOUBLING, MESSAGE_FAULTS, Fault, draw_plan
from simulation.play import play
from simulation.rules import find_violations
from simulation.stand_ins import SIMULATED, installed
from tiers import in_tiers

QUICK, MANY = (*range(8), 12, 21, 31, 32, 48, 51, 52, 174), 2000
"""Every kind of fault, and what planted bugs make fail: in 174, averaged momenta on the way."""
QUICK_DOUBLING, MANY_DOUBLING = (0, 1, 3, 4, 5, 7, 21, 32, 48), 1000
"""In the last three settings differ, a worker gives up, and one leaves."""
QUICK_CREWS, MANY_CREWS = (2, 6, 18, 23, 24, 31, 32, 35, 37, 73, 86), 1000
"""Every kind of fault, and what planted bugs make fail: in 73, one that is a step behind."""
JOINS = [2, 5, 7, 9]
"""In these something dies, is late, is cut off, and stops; in 2 newcomers are let in before a
batch."""
QUICK_CALLS = 20
ALL_KINDS = {*MESSAGE_FAULTS, "late", "leave", "settings", "give up"}


def _play(seeds: Sequence[int], *, kinds: set[str] = ALL_KINDS, of_crews: bool = False) -> None:
    total = Tally()
    for start in range(0, len(seeds), BATCH):
        total.add(play_seeds(seeds[start : start + BATCH], of_crews=of_crews))
        assert not total.failures, describe(total, 0.0)
    assert total.schedules == len(seeds)
    assert set(total.fired) == kinds, "a kind of fault never struck"


def test_some_schedules_keep_all_rules() -> None:
    _play(QUICK)


def test_late_news_of_a_death_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = play(draw_plan(61))
    assert [fault.kind for fault, _ in outcome.fired] == ["die"]
    assert not find_violations(outcome)
    monkeypatch.setattr(rules, "NEWS_S", 0.1)
    assert any("hears of a death" in text for text in find_violations(outcome))


def test_a_worker_that_is_late_by_more_than_its_timeout_is_waited_for() -> None:
    plan = draw_plan(720)
    outcome = play(plan)
    ((fault, _),) = outcome.fired
    assert fault.kind == "late" and fault.seconds > 2 * plan.timeouts.step_s
    assert {diary.ending for diary in outcome.diaries} == {"finished"}
    assert not find_violations(outcome)


def test_who_has_its_pairs_waits_for_one_that_connects_with_a_dead_rank() -> None:
    plan = draw_plan(1_000_997)
    outcome = play(replace(plan, faults=(replace(plan.faults[0], at=17),)))
    assert [(fault.kind, fault.victim) for fault, _ in outcome.fired] == [("die", 1)]
    waiting = outcome.diaries[2].fatal
    assert waiting is not None
    assert (waiting.kind, waiting.culprits) == ("StepTimeoutError", (1,))
    assert not find_violations(outcome)


@pytest.mark.slow
def test_two_thousand_more_schedules_keep_all_rules() -> None:
    _play(range(MANY))


def test_some_schedules_of_votes_added_on_their_way_keep_all_rules() -> None:
    _play([FIRST_DOUBLING + seed for seed in QUICK_DOUBLING])


@pytest.mark.slow
def test_a_thousand_schedules_of_votes_added_on_their_way_keep_all_rules() -> None:
    _play(range(FIRST_DOUBLING, FIRST_DOUBLING + MANY_DOUBLING))


def test_some_crews_keep_all_rules() -> None:
    _play(QUICK_CREWS, kinds=set(KINDS), of_crews=True)


@pytest.mark.slow
def test_a_thousand_more_crews_keep_all_rules() -> None:
    _play(range(MANY_CREWS), kinds=set(KINDS), of_crews=True)


@pytest.mark.parametrize("seeds", in_tiers([JOINS, range(400)], lambda seeds: seeds is JOINS))
def test_crews_that_newcomers_join_keep_all_rules(seeds: Sequence[int]) -> None:
    tally = play_seeds(seeds, joins=True)
    assert not tally.failures


@pytest.mark.parametrize("seeds", in_tiers([[1, 4], range(300)], lambda seeds: len(seeds) < 300))
def test_crews_that_lose_their_store_keep_all_rules(seeds: Sequence[int]) -> None:
    tally = play_seeds(seeds, outages=True)
    assert not tally.failures
    assert tally.fired["restart"]


@pytest.mark.parametrize("seed", in_tiers([1, 35, 37], lambda seed: seed == 37))
def test_a_seed_replays_its_crew(seed: int) -> None:
    first, second = (play_crew(draw_crew_plan(seed)) for _ in range(2))
    assert first.story == second.story
    assert first.diaries == second.diaries


@pytest.mark.parametrize("seed", in_tiers([1, 7, 11], lambda seed: seed == 7))
def test_a_seed_replays_its_schedule(seed: int) -> None:
    first, second = (play(draw_plan(seed)) for _ in range(2))
    assert first.story == second.story
    assert len(first.story) > 50
    assert [diary.states for diary in first.diaries] == [diary.states for diary in second.diaries]


def test_the_package_waits_for_nothing_that_is_not_simulated() -> None:
    assert distlion.DistributedLion.__module__.startswith("distlion.optim")
    waits = {
        "time",
        "threading",
        "queue",
        "concurrent.futures._base",
        "socket",
        "select",
        "asyncio",
    }
    network = Network(Kernel(0, 1.0), 2, Delays(0.0, 0.0), has_agent=True)
    modules = {name: module for name, module in sys.modules.items() if name.startswith(SIMULATED)}
    assert len(modules) > 30
    with installed(Distributed(network)):
        found = [
            f"{name}.{attribute}"
            for name, module in modules.items()
            for attribute, value in vars(module).items()
            if getattr(value, "__module__", None) in waits
            or getattr(value, "__name__", None) in {*waits, "torch.distributed"}
        ]
    assert not found


def test_a_call_in_place_of_a_step_is_one_error_on_all_workers() -> None:
    struck = 0
    for seed in range(QUICK_CALLS):
        drawn = draw_plan(seed)
        fault = Fault("call", victim=seed % drawn.size, at=1)
        # Without overlap, as votes of a step that has begun are given up before the call.
        timeouts = replace(drawn.timeouts, step_s=60.0, busy_s=60.0)
        options = {**drawn.options, "overlap": False, "timeouts": timeouts}
        plan = replace(drawn, options=options, faults=(fault,), transport_s=None, poisons=())
        outcome = play(plan)
        if drawn.is_slow or not outcome.fired:
            continue
        struck += 1
        assert not find_violations(outcome), seed
        raised = [diary.fatal for diary in outcome.diaries if diary.fatal is not None]
        assert [each.kind for each in raised] == ["ConfigMismatchError"] * plan.size, seed
        begun_s = max(each.begun_s for each in raised)
        assert all(each.at_s - begun_s < LONG_S + rules.NEWS_S for each in raised), seed
    assert struck > QUICK_CALLS / 2
