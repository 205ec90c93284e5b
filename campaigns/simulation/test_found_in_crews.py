"""What the simulation has found in crews once, each in the schedule that shows it best."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from distlion.crew import CrewLion, epoch
from distlion.crew.epoch import Epoch, Member
from distlion.crew.lookout import Lookout
from distlion.crew.membership import Membership
from distlion.peers import routing
from distlion.wire import LinkModel, Transport, probe_link
from simulation.crews import play
from simulation.crews.plan import Coming, CrewFault, CrewPlan, draw_crew_plan
from simulation.crews.play import CrewOutcome, play_crew
from simulation.crews.rules import find_crew_violations
from simulation.network import Delays
from tiers import in_tiers

GOAL = 4


def make_crew_plan(seed: int, *faults: CrewFault, **changes: Any) -> CrewPlan:
    """Return a plain schedule of three workers, of whom two are enough."""
    plan = replace(
        draw_crew_plan(0),
        seed=seed,
        starts_s=(0.0, 0.0, 0.0),
        comings=(),
        min_workers=2,
        max_workers=None,
        newcomers="zeros",
        rules=("majority",),
        sizes=(65,),
        goal=GOAL,
        delays=Delays(0.0001, 0.005, store_s=0.005),
        compute_s=0.1,
        skew_s=0.0,
        faults=faults,
    )
    timeouts = replace(plan.options["timeouts"], init_s=2.0, step_s=2.0)
    options = {**plan.options, "overlap": False, "clip_norm": None, "timeouts": timeouts}
    return replace(plan, options=options, **changes)


def list_endings(outcome: CrewOutcome) -> list[str]:
    return [outcome.diaries[number].ending for number in sorted(outcome.diaries)]


@pytest.mark.parametrize("after", in_tiers(range(8, 20), lambda after: after % 4 == 0))
def test_those_that_ask_begin_without_the_first_if_it_is_lost(after: int) -> None:
    fault = CrewFault("die", 0, "forming", 0, after)
    outcome = play_crew(make_crew_plan(0, fault))
    assert find_crew_violations(outcome) == []
    assert outcome.fired and not outcome.diaries[0].entries


def test_who_met_others_in_vain_brings_no_parameters() -> None:
    for after in range(36, 56, 4):  # while the first epoch connects and takes parameters
        outcome = play_crew(make_crew_plan(1, CrewFault("die", 0, "forming", 0, after)))
        assert len(outcome.fired) == 1
        assert find_crew_violations(outcome) == []
        assert list_endings(outcome) == ["died", "finished", "finished"]


@pytest.mark.parametrize(
    ("victim", "seed"),
    in_tiers(itertools.product(range(3), range(1, 4)), lambda case: case in ((0, 1), (2, 2))),
)
def test_others_go_on_without_a_worker_that_reaches_the_store_alone(victim: int, seed: int) -> None:
    cut = CrewFault("split", victim, "training", 0, 10)
    outcome = play_crew(make_crew_plan(seed, cut))
    assert len(outcome.fired) == 1
    endings = list_endings(outcome)
    assert endings.count("finished") == 2 and endings[victim] == "raised", endings


def test_who_waits_itself_does_not_say_that_it_trains() -> None:
    outcome = play_crew(draw_crew_plan(135))
    assert any("asks: 1" in line for line in outcome.story)
    assert find_crew_violations(outcome) == []


@pytest.mark.parametrize("moment", [("committed", GOAL - 1, 0), ("ending", 0, 0)])
@pytest.mark.parametrize(("kind", "ending"), [("die", "died"), ("stop", "stopped")])
def test_nobody_waits_at_the_end_for_a_worker_that_is_gone(
    kind: Any, ending: str, moment: Any
) -> None:
    outcome = play_crew(make_crew_plan(1, CrewFault(kind, 1, *moment)))
    assert len(outcome.fired) == 1
    assert find_crew_violations(outcome) == []
    assert list_endings(outcome) == ["finished", ending, "finished"]


@pytest.mark.parametrize("moment", [("forming", 0, 12), ("committed", GOAL - 1, 0)])
def test_a_store_that_is_lost_ends_all_with_an_error_of_ours(moment: Any) -> None:
    outcome = play_crew(make_crew_plan(1, CrewFault("store", 1, *moment, seconds=math.inf)))
    assert len(outcome.fired) == 1
    assert find_crew_violations(outcome) == []
    assert set(list_endings(outcome)) == {"raised"}


# By the seed the process lives on for long, or not.
@pytest.mark.parametrize("seed", in_tiers(range(6), lambda seed: seed < 2))
def test_others_meet_while_the_process_of_a_script_that_failed_lives_on(seed: int) -> None:
    left = CrewFault("leave", 1, "training", 2, 0)
    plan = make_crew_plan(seed, left, comings=(Coming(1, 0.0),), compute_s=1.0)
    outcome = play_crew(plan)
    assert find_crew_violations(outcome) == []
    assert list_endings(outcome) == ["finished", "left", "finished", "finished"]


def test_a_worker_without_a_place_hears_that_the_run_is_over() -> None:
    plan = make_crew_plan(1, max_workers=3, starts_s=(0.0, 0.0, 0.0, 2.5))
    outcome = play_crew(plan)
    assert find_crew_violations(outcome) == []
    (error,) = [diary.error for diary in outcome.diaries.values() if diary.ending == "raised"]
    assert "the run is over" in error[1]


@pytest.mark.parametrize("seed", in_tiers(range(4), lambda seed: seed == 0))
def test_workers_who_are_too_many_do_not_keep_the_others_from_training(seed: int) -> None:
    died = CrewFault("die", 0, "committed", 1, 0, restarts_after_s=1.0)
    plan = make_crew_plan(seed, died, max_workers=3, starts_s=(0.0,) * 4, goal=8)
    outcome = play_crew(replace(plan, compute_s=1.0, comings=(Coming(1, 0.0),)))
    assert find_crew_violations(outcome) == []
    assert outcome.virtual_s < 60
    epochs = {entry.number for diary in outcome.diaries.values() for entry in diary.entries}
    assert len(epochs) < 4


@pytest.mark.parametrize("seed", in_tiers(range(5), lambda seed: seed in (0, 3)))
def test_survivors_decide_once(seed: int) -> None:
    fault = CrewFault("die", 0, "training", 0, 15 + seed)
    outcome = play_crew(make_crew_plan(seed, fault, starts_s=(0.0,) * 5))
    assert len(outcome.fired) == 1
    assert find_crew_violations(outcome) == []
    assert list_endings(outcome) == ["died", *["finished"] * 4]
    epochs = {entry.number for diary in outcome.diaries.values() for entry in diary.entries}
    assert len(epochs) == 2


@pytest.mark.parametrize("seed", in_tiers(range(8), lambda seed: seed % 4 == 0))
def test_an_epoch_that_could_not_be_formed_is_not_tried_again(seed: int) -> None:
    first = CrewFault("die", 0, "training", 0, 20)
    second = CrewFault("die", 1, "forming", 1, 6 + seed)
    outcome = play_crew(make_crew_plan(seed, first, second, starts_s=(0.0,) * 4))
    assert find_crew_violations(outcome) == []
    tried = {number for diary in outcome.diaries.values() for number, _ in diary.tried}
    assert len(tried - {0}) > 2


TURNOVER = [CrewFault("die", each, "committed", 2 + 10 * each, 0) for each in range(3)]
LATER = tuple(Coming(3 + 10 * each, 0.5) for each in range(3))
"""Once all have died that began the run, those train that were let in by others."""


@pytest.mark.parametrize("seed", in_tiers(range(1, 4), lambda seed: seed == 1))
def test_spares_do_not_begin_anew_beside_a_crew_that_is_full(seed: int) -> None:
    spares = (Coming(45, 0.0), Coming(45, 0.1))
    plan = make_crew_plan(
        seed, *TURNOVER, comings=LATER + spares, goal=80, max_workers=3, compute_s=0.5
    )
    outcome = play_crew(plan)
    assert len(outcome.fired) == 3
    assert find_crew_violations(outcome) == []
    for number in (3, 4, 5):
        steps = [entry.step for entry in outcome.diaries[number].entries]
        assert steps == sorted(steps)
    assert [outcome.diaries[number].ending for number in (3, 4, 5)] == ["finished"] * 3


def test_a_run_that_has_ended_is_closed_by_those_who_were_let_in() -> None:
    late = (Coming(39, 12.0), Coming(39, 12.1))
    plan = make_crew_plan(1, *TURNOVER, comings=LATER + late, goal=40, compute_s=0.5)
    outcome = play_crew(plan)
    assert [outcome.diaries[number].ending for number in (3, 4, 5)] == ["finished"] * 3
    assert all("the run is over" in outcome.diaries[number].error[1] for number in (6, 7))


def test_others_go_on_without_a_process_whose_main_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(play, "LINGERS_S", (200.0,))  # its other threads go on for so long
    plan = make_crew_plan(1, CrewFault("abandon", 1, "training", 2, 0), goal=8)
    patient = replace(plan.options["timeouts"], busy_s=100.0)
    outcome = play_crew(replace(plan, options={**plan.options, "timeouts": patient}))
    assert len(outcome.fired) == 1
    assert find_crew_violations(outcome) == []
    assert list_endings(outcome) == ["finished", "left", "finished"]
    assert outcome.virtual_s < 60


def test_newcomers_do_not_begin_anew_while_others_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where members form an epoch for so long that nobody lets newcomers in."""
    look, last = Lookout._look_for_asks, 2 * len(TURNOVER) - 1

    def look_at_first(lookout: Lookout, epoch: Epoch) -> bool:
        is_open = all(member.id != last for member in epoch.members)
        return is_open and look(lookout, epoch)

    monkeypatch.setattr(Lookout, "_look_for_asks", look_at_first)
    unseen = (Coming(45, 0.0), Coming(45, 0.1))
    plan = make_crew_plan(1, *TURNOVER, comings=LATER + unseen, goal=90, compute_s=0.5)
    outcome = play_crew(plan)
    assert len(outcome.fired) == 3
    assert list_endings(outcome) == ["died"] * 3 + ["finished"] * 3 + ["raised"] * 2
    assert [outcome.diaries[number].entries for number in (6, 7)] == [[], []]


@pytest.mark.parametrize("ways", ["both", "from", "to"])
def test_a_newcomer_that_reaches_the_store_alone_is_left_out_after_one_try(ways: Any) -> None:
    cut = CrewFault("split", 3, "forming", 0, 0, ways=ways)
    # With "donor" it asks at once: it does not try to catch up first, until the run is over.
    plan = make_crew_plan(1, cut, comings=(Coming(3, 0.0),), goal=12, newcomers="donor")
    outcome = play_crew(plan)
    assert len(outcome.fired) == 1
    assert any(number for number, _ in outcome.diaries[3].tried), "nobody has let it in"
    assert find_crew_violations(outcome) == []
    assert list_endings(outcome) == ["finished"] * 3 + ["raised"]
    committed_s = [time_s for _, _, time_s in outcome.diaries[0].commits]
    # Of the simulated clock: two tries with the newcomer last 13 seconds.
    assert max(later - time_s for time_s, later in pairwise(committed_s)) < 6


@pytest.mark.parametrize(
    "moments", in_tiers([[2.65], [2.63, 2.67, 2.69]], lambda each: len(each) == 1)
)
def test_who_wakes_as_others_begin_an_epoch_is_let_in(
    moments: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, n_late = Membership._ask, 0

    def ask_late(membership: Membership, own: Member, *args: Any) -> Epoch:
        nonlocal n_late
        n_late += own.epoch > 0
        epoch.time.sleep(0.3)
        return find(membership, own, *args)

    monkeypatch.setattr(Membership, "_ask", ask_late)
    for seconds in moments:
        held = CrewFault("stop", 1, "training", 0, 20, seconds=seconds)
        outcome = play_crew(make_crew_plan(1, held, goal=100))
        assert len(outcome.fired) == 1
        assert find_crew_violations(outcome) == []
        assert list_endings(outcome) == ["finished"] * 3
    assert n_late > 0


def test_what_comes_while_an_epoch_may_still_fail_does_not_reach_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broadcast of weights may end after its epoch was given up."""
    fire, own, kept = CrewLion._fire_forming, dict[CrewLion, list[Tensor]](), list[bool]()

    def look(optimizer: CrewLion, point: Any) -> None:
        fire(optimizer, point)
        params = [param.detach() for param in optimizer._param_names()]
        if point == "connect":
            own[optimizer] = [param.clone() for param in params]
        elif point == "load":
            kept.append(all(map(torch.equal, own[optimizer], params)))

    monkeypatch.setattr(CrewLion, "_fire_forming", look)
    assert find_crew_violations(play_crew(make_crew_plan(1))) == []
    assert kept == [True] * 3
    assert len({tuple(params[0].tolist()) for params in own.values()}) == 3


def test_who_has_not_formed_an_epoch_to_its_end_is_no_member_of_it() -> None:
    assert find_crew_violations(play_crew(draw_crew_plan(1271))) == []


@pytest.mark.slow
def test_an_epoch_is_judged_though_its_first_member_has_never_entered_one() -> None:
    assert find_crew_violations(play_crew(draw_crew_plan(6565))) == []


@pytest.mark.parametrize("seed", [9454, 9659])
def test_no_second_run_begins_beside_the_first(seed: int) -> None:
    """Some of the first workers die, or messages are late, and two groups are about to begin."""
    assert find_crew_violations(play_crew(draw_crew_plan(seed))) == []


def test_those_who_could_not_begin_a_run_try_again_with_all_who_did() -> None:
    outcome = play_crew(draw_crew_plan(1290))
    assert find_crew_violations(outcome) == []
    (second,) = (entry for entry in outcome.diaries[1].entries if entry.number == 2)
    assert len(second.members) == 3


def test_a_worker_that_has_finished_outlasts_a_store_that_is_stopped() -> None:
    """Its request ends in vain just before it sees that the store is away."""
    outcome = play_crew(draw_crew_plan(6174))
    assert any("in vain" in line for line in outcome.story)
    assert find_crew_violations(outcome) == []


def test_a_crew_measures_its_link_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def probe(link: Transport, *, step: int) -> LinkModel:
        measured.append(step)
        return probe_link(link, step=step)

    monkeypatch.setattr(routing, "probe_link", probe)
    plan = make_crew_plan(1, *TURNOVER, comings=LATER, goal=40, compute_s=0.5)
    outcome = play_crew(replace(plan, options={**plan.options, "exchange": "auto"}))
    assert find_crew_violations(outcome) == []
    assert len({entry.number for each in outcome.diaries.values() for entry in each.entries}) > 3
    assert measured == [0] * 3
