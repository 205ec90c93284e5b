"""Newcomers of a crew receive the right state from their donor, in schedules without faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from distlion.crew import CrewLion
from distlion.crew.donor import Donor
from distlion.crew.epoch import Epoch
from distlion.crew.replies import Replica, StepReply
from simulation.crews.plan import Coming, CrewFault, CrewPlan, draw_join_plan
from simulation.crews.play import CrewOutcome, play_crew
from simulation.crews.rules import find_crew_violations
from simulation.kernel import running
from simulation.network import Delays
from tiers import in_tiers

SIZE = 4
"""Workers before the newcomer, whose number this is: with one less, counts have one bit less."""
COMMIT_S = 0.03
"""Seconds from a commit's first write to its last; two pieces are sent in less."""


def make_plan(seed: int, *faults: CrewFault) -> CrewPlan:
    """Return a schedule in which a newcomer's parameters take many steps to come."""
    plan = draw_join_plan(0)
    timeouts = replace(plan.options["timeouts"], init_s=2.0, step_s=2.0)
    return replace(
        plan,
        seed=seed,
        starts_s=(0.0,) * SIZE,
        comings=(Coming(3, 0.0),),
        min_workers=2,
        sizes=(12_000,),
        rules=("average",),
        options={**plan.options, "overlap": False, "clip_norm": None, "timeouts": timeouts},
        goal=40,
        delays=Delays(0.0001, 0.005, store_s=0.005),
        compute_s=0.1,
        skew_s=0.0,
        absent=False,
        faults=faults,
        replay_steps=64,
    )


def check_caught_up(outcome: CrewOutcome) -> None:
    """Check that the newcomer has become a member while the others went on."""
    newcomer = outcome.diaries[SIZE]
    assert find_crew_violations(outcome) == []
    assert newcomer.followed == [True]
    assert newcomer.entries and newcomer.ending == "finished"


@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_that_nothing_strikes_catches_up_with_its_first_donor(seed: int) -> None:
    check_caught_up(play_crew(make_plan(seed)))


def test_replies_of_two_epochs_are_read_by_the_roster_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay, sizes = Replica.replay, set[int]()

    def note_and_replay(replica: Replica, reply: StepReply) -> None:
        sizes.add(len(reply.roster.ids))
        replay(replica, reply)

    monkeypatch.setattr(Replica, "replay", note_and_replay)
    check_caught_up(play_crew(make_plan(1, CrewFault("die", 1, "committed", 6, 0))))
    assert sizes == {SIZE, SIZE - 1}


def test_nothing_is_copied_while_a_commit_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulation a commit takes no time, unless somebody waits within it."""
    advance = CrewLion._advance

    def advance_late(optimizer: CrewLion) -> None:
        running().sleep(COMMIT_S)
        advance(optimizer)

    monkeypatch.setattr(CrewLion, "_advance", advance_late)
    check_caught_up(play_crew(make_plan(1)))


@pytest.mark.parametrize("victim", in_tiers(range(SIZE), lambda victim: victim < 2))
def test_a_newcomer_leaves_a_donor_that_has_lost_the_store(victim: int) -> None:
    """The others train without it, and its stream goes on."""
    fault = CrewFault("unheard", victim, "committed", 6, 0)
    outcome = play_crew(replace(make_plan(1, fault), goal=200))
    assert len(outcome.fired) == 1
    assert find_crew_violations(outcome) == []
    newcomer = outcome.diaries[SIZE]
    assert newcomer.entries and newcomer.ending == "finished"
    assert outcome.diaries[victim].ending == "raised"


def test_a_member_whose_parameters_will_be_others_gives_them_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its count of steps is that of the others' parameters."""
    enter, take, stop = CrewLion._enter, CrewLion._take_given, Donor.stop
    stopped, n_taken = set[int](), 0

    def forget_and_enter(optimizer: CrewLion, epoch: Epoch) -> None:
        stopped.discard(id(optimizer._donor))
        enter(optimizer, epoch)

    def note_and_stop(donor: Donor) -> None:
        stopped.add(id(donor))
        stop(donor)

    def check_and_take(optimizer: CrewLion, given: Mapping[str, Any]) -> None:
        nonlocal n_taken
        if optimizer.committed_step:
            n_taken += 1
            assert id(optimizer._donor) in stopped
        take(optimizer, given)

    monkeypatch.setattr(CrewLion, "_enter", forget_and_enter)
    monkeypatch.setattr(Donor, "stop", note_and_stop)
    monkeypatch.setattr(CrewLion, "_take_given", check_and_take)
    for seed in (2, 3):  # one that dies after a commit leaves another one a step behind
        outcome = play_crew(make_plan(seed, CrewFault("die", 1, "committed", 6, 0)))
        assert find_crew_violations(outcome) == []
    assert n_taken
