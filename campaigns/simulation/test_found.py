"""What the simulation has found once, each in the schedule that shows it best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distlion import Agreement, RecursiveDoubling, Replicas
from distlion.wire import AllReduce
from simulation.network import Delays
from simulation.plan import Fault, Plan, draw_plan
from simulation.play import Outcome, play
from simulation.rules import find_violations

TIMEOUT_S = 4.0
VICTIM = 2


def make_plan(seed: int, *faults: Fault) -> Plan:
    """Return a plain schedule of three workers; rank 0 keeps the store and ends at once."""
    drawn = draw_plan(0)
    options = {
        **drawn.options,
        "exchange": AllReduce(),
        "nodes": None,
        "momentum_sync": None,
        "overlap": False,
        "clip_norm": None,
        "agreement": Agreement(),
        "replicas": Replicas(check_every=1),
        "timeouts": replace(drawn.timeouts, init_s=TIMEOUT_S, step_s=TIMEOUT_S),
    }
    return replace(
        drawn,
        seed=seed,
        size=3,
        sizes=(65, 130),
        rules=("majority",),
        options=options,
        steps=3,
        delays=Delays(0.0001, 0.005, store_s=0.005),
        compute_s=0.01,
        lingers_s=(0.0, 0.0, 0.0),
        has_agent=False,
        transport_s=None,
        absent=False,
        poisons=(),
        faults=faults,
    )


def _assert_blamed(outcome: Outcome, rank: int) -> None:
    raised = outcome.diaries[rank].fatal
    assert raised is not None, f"rank {rank} {outcome.diaries[rank].ending}"
    assert (raised.kind, raised.culprits) == ("PeerLostError", (VICTIM,)), raised.text


@pytest.mark.parametrize("seed", range(4))
def test_survivors_name_the_dead_rank_although_the_store_goes_with_the_first_to_end(
    seed: int,
) -> None:
    outcome = play(make_plan(seed, Fault("die", VICTIM, at=30)))
    assert len(outcome.fired) == 1
    assert find_violations(outcome) == []
    for rank in (0, 1):
        _assert_blamed(outcome, rank)


@pytest.mark.parametrize("seed", range(4))
def test_who_has_read_what_all_found_keeps_it_while_it_waits_for_other_readers(seed: int) -> None:
    gone = Fault("leave", VICTIM, at=1)
    answers_and_ends = Fault("leave", 3, at=1)
    plan = make_plan(seed, gone, answers_and_ends)
    slow = replace(plan.delays, store_s=0.012)
    outcome = play(replace(plan, size=4, lingers_s=(0.0, 0.0, 0.0, 0.45), delays=slow))
    assert len(outcome.fired) == 2
    for rank in (0, 1):
        _assert_blamed(outcome, rank)


@pytest.mark.parametrize("late_s", [0.45, 0.55])
def test_who_fails_half_a_second_later_reads_what_the_others_found(late_s: float) -> None:
    late = Fault("late", 1, at=1, seconds=late_s)
    outcome = play(make_plan(1, Fault("leave", VICTIM, at=1), late))
    assert len(outcome.fired) == 2
    for rank in (0, 1):
        _assert_blamed(outcome, rank)


def test_digests_that_are_damaged_on_the_way_to_one_worker_end_it_alone() -> None:
    # Before it come two announcements each of settings, weights and the order of parameters.
    outcome = play(make_plan(2, Fault("damage", VICTIM, at=6, framing="questions")))
    assert len(outcome.fired) == 1
    assert find_violations(outcome) == []
    errors = [diary.fatal for diary in outcome.diaries if diary.fatal is not None]
    assert sorted(error.kind for error in errors) == ["CorruptFrameError", *["PeerLostError"] * 2]
    (corrupt,) = (error for error in errors if error.kind == "CorruptFrameError")
    assert corrupt.culprits == (VICTIM,)


@pytest.mark.parametrize("seed", range(4))
def test_who_sees_the_store_go_while_it_waits_for_answers_does_not_say_it_was_held_up(
    seed: int,
) -> None:
    plan = make_plan(seed, Fault("leave", VICTIM, at=1), Fault("leave", 0, at=1))
    outcome = play(replace(plan, lingers_s=(0.6, 0.0, 0.0)))
    assert len(outcome.fired) == 2
    raised = outcome.diaries[1].fatal
    assert raised is not None and raised.culprits == (0,), raised
    assert "held up" not in raised.text


@pytest.mark.parametrize("at", [15, 16, 17])
@pytest.mark.parametrize("seed", [1, 2])
def test_who_cannot_make_a_pair_agrees_on_the_dead_rank_before_it_ends_with_the_store(
    seed: int, at: int
) -> None:
    plan = make_plan(seed, Fault("die", 1, at=at))
    outcome = play(replace(plan, options={**plan.options, "exchange": RecursiveDoubling()}))
    assert len(outcome.fired) == 1
    first, last = outcome.diaries[0].fatal, outcome.diaries[2].fatal
    assert first is not None and first.kind == "ProcessGroupError"
    assert "(rank 1 did not answer)" in first.text
    assert last is not None and last.culprits == (1,)
    assert find_violations(outcome) == []


def test_rank_that_has_taken_its_last_step_may_be_missed_beside_a_damaged_frame() -> None:
    outcome = play(draw_plan(1379))
    assert [fault.kind for fault, _ in outcome.fired] == ["damage"]
    assert [diary.ending for diary in outcome.diaries] == ["raised", "raised"] + ["finished"] * 2
    assert not list(find_violations(outcome))
