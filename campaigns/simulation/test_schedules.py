"""After every schedule, all is as it must be."""

from __future__ import annotations

import sys
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

QUICK, MANY = 50, 2000
AVERAGED = range(174, 175)
"""The first schedule in which averaged momenta fail on the way."""
QUICK_DOUBLING = range(8), range(21, 22), range(32, 33), range(48, 49)
"""A few, and the first with settings that differ, a worker that gives up, and one that leaves."""
MANY_DOUBLING = 1000
QUICK_CREWS, MANY_CREWS = 40, 1000
LATER_CREWS = range(73, 74), range(85, 90)
"""A crew with one that is a step behind, and crews among which a main thread ends; the first ones
have neither."""
QUICK_CALLS = 40
ALL_KINDS = {*MESSAGE_FAULTS, "late", "leave", "settings", "give up"}


def _play(*some: range, kinds: set[str] = ALL_KINDS, of_crews: bool = False) -> None:
    total = Tally()
    for seeds in some:
        for start in range(seeds.start, seeds.stop, BATCH):
            batch = range(start, min(start + BATCH, seeds.stop))
            total.add(play_seeds(batch, of_crews=of_crews))
            assert not total.failures, describe(total, 0.0)
    assert total.schedules == sum(map(len, some))
    assert set(total.fired) == kinds, "a kind of fault never struck"


def test_some_schedules_keep_all_rules() -> None:
    _play(range(QUICK), AVERAGED)


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
    _play(range(QUICK, QUICK + MANY))


def test_some_schedules_of_votes_added_on_their_way_keep_all_rules() -> None:
    first = FIRST_DOUBLING
    _play(*(range(first + some.start, first + some.stop) for some in QUICK_DOUBLING))


@pytest.mark.slow
def test_a_thousand_schedules_of_votes_added_on_their_way_keep_all_rules() -> None:
    _play(range(FIRST_DOUBLING, FIRST_DOUBLING + MANY_DOUBLING))


def test_some_crews_keep_all_rules() -> None:
    _play(range(QUICK_CREWS), *LATER_CREWS, kinds=set(KINDS), of_crews=True)


@pytest.mark.slow
def test_a_thousand_more_crews_keep_all_rules() -> None:
    _play(range(QUICK_CREWS, QUICK_CREWS + MANY_CREWS), kinds=set(KINDS), of_crews=True)


@pytest.mark.parametrize("seeds", in_tiers([range(12), range(12, 400)], lambda seeds: not seeds[0]))
def test_crews_that_newcomers_join_keep_all_rules(seeds: range) -> None:
    tally = play_seeds(seeds, joins=True)
    assert not tally.failures


@pytest.mark.parametrize("seeds", in_tiers([range(5), range(5, 300)], lambda seeds: not seeds[0]))
def test_crews_that_lose_their_store_keep_all_rules(seeds: range) -> None:
    tally = play_seeds(seeds, outages=True)
    assert not tally.failures
    assert tally.fired["restart"]


@pytest.mark.parametrize("seed", in_tiers([1, 35], lambda seed: seed == 35))
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
