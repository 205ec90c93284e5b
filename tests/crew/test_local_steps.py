"""Workers of a crew with local steps are lost, stopped, or come; the others vote again."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distlion
from cluster import WorkerDiedError
from crews import (
    await_members,
    await_true,
    draw_loss,
    host_store,
    list_reasons,
    make_crew,
    make_model,
    start,
)
from distlion import faults
from distlion.crew import CrewLocalSteps, lookout, membership
from distlion.crew.admission import list_asks
from local_crews import (
    EVERY,
    GOAL,
    STRUCK_AT,
    bits,
    check_equal,
    connect,
    make_muon_and_adamw,
    strike,
    train,
)
from local_runs import are_equal
from tiers import in_tiers

IN_A_LOCAL_STEP = "in a local step"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residuals, momentum": {
        "aggregation": distlion.ResidualVote(),
        "outer_momentum": 0.9,
        "outer_lr": 0.5,
    },
    "estimates": {"aggregation": distlion.EstimateVote()},
    "momentum": {"outer_momentum": 0.5},
    "muon and adamw": {"make_inner": make_muon_and_adamw},
}


def strike_one(
    rank: int, size: int, port: int, name: str, point: Any, how: signal.Signals
) -> dict[str, Any]:
    """The worker of rank 0 is struck, and woken once the others are two votes further."""
    crew, store = make_crew(port, min_workers=2, max_workers=size), connect(port)

    def act(optimizer: CrewLocalSteps) -> None:
        votes = optimizer.committed_step
        if rank == 0 and votes == STRUCK_AT and not store.check(["struck"]):
            if point == IN_A_LOCAL_STEP:
                if optimizer.local_step % EVERY == 2:
                    strike(store, how)
            elif not faults.armed:
                faults.arm(
                    rank=crew.rank,
                    step=STRUCK_AT,
                    point=point,
                    action=lambda _: strike(store, how),
                )
        if rank and how == signal.SIGSTOP and votes == STRUCK_AT + 2:
            if not store.check(["woken"]):
                store.set("woken", "")
                os.kill(int(store.get("pid")), signal.SIGCONT)
            await_members(crew, size)

    result = train(crew, seed=rank, size=size, each=act, **KINDS[name])
    return {**result, "struck": store.add("struck", 0)}


@pytest.mark.parametrize(
    ("name", "point"),
    in_tiers(
        [
            ("plain", IN_A_LOCAL_STEP),
            ("residuals, momentum", "before_step"),
            ("estimates", "framed"),
            ("momentum", "before_commit"),
            ("plain", "after_commit"),
        ],
        lambda case: case[1] in (IN_A_LOCAL_STEP, "framed"),
    ),
)
def test_others_vote_again_when_a_worker_is_killed(name: str, point: str) -> None:
    store = host_store()
    dead, *results = start(strike_one, 3, store.port, name, point, signal.SIGKILL, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results)
    for result in results:
        assert result["struck"] == 1
        assert result["counts"] == (GOAL, GOAL // EVERY)
        assert len(result["points"]) == GOAL // EVERY
        sizes = {vote: len(ids) for vote, (_, ids) in result["rosters"].items()}
        assert sizes[STRUCK_AT] == 3
        assert sizes[STRUCK_AT + 2] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", in_tiers([IN_A_LOCAL_STEP, "before_step"], lambda point: point == "before_step")
)
def test_a_worker_that_was_stopped_comes_back_at_a_vote(point: str) -> None:
    store = host_store()
    name = "residuals, momentum"
    results = start(strike_one, 3, store.port, name, point, signal.SIGSTOP)
    check_equal(results)
    stopped = results[0]["id"]
    for result in results:
        assert result["struck"] == 1
        assert len(result["rosters"][GOAL // EVERY][1]) == 3
        assert any(f"came: worker {stopped} (back)" in line for line in result["formed"])
    # It has no outcome of the votes that the others took without it.
    assert STRUCK_AT + 1 not in results[0]["points"]
    assert STRUCK_AT + 1 in results[1]["points"]


def strike_while_forming(
    rank: int, size: int, port: int, point: faults.FormingPoint
) -> dict[str, Any]:
    """One worker is killed in a local step, and another one while the next epoch is formed."""
    crew, store = make_crew(port, min_workers=2, max_workers=size), connect(port)

    def act(optimizer: CrewLocalSteps) -> None:
        if optimizer.committed_step != STRUCK_AT:
            return
        if rank == 0:
            strike(store)
        elif rank == 1 and not faults.armed:
            faults.arm(rank=crew.id, step=STRUCK_AT, point=point, action=lambda _: strike(store))

    result = train(
        crew,
        seed=rank,
        size=size,
        each=act,
        timeouts=distlion.Timeouts(init_s=3, step_s=4),
        outer_momentum=0.5,
    )
    return {**result, "struck": store.add("struck", 0)}


@pytest.mark.parametrize(
    "point", in_tiers(["arrive", "broadcast", "load"], lambda point: point == "broadcast")
)
def test_others_go_on_when_a_worker_is_killed_while_an_epoch_is_formed(point: str) -> None:
    store = host_store()
    outcomes = start(strike_while_forming, 4, store.port, point, may_die=True)
    assert [isinstance(each, WorkerDiedError) for each in outcomes] == [True, True, False, False]
    check_equal(outcomes[2:])
    for result in outcomes[2:]:
        assert result["struck"] == 2
        assert len(result["rosters"][GOAL // EVERY][1]) == 2


def join_late(rank: int, size: int, port: int, name: str, has_last_vote: bool) -> dict[str, Any]:
    """The last worker comes in a period, or before a vote out of turn."""
    store = connect(port)
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, max_workers=size)
    goal = GOAL - 1 if has_last_vote else GOAL
    called_at = goal if has_last_vote else STRUCK_AT * EVERY + 2

    def act(optimizer: CrewLocalSteps) -> None:
        if optimizer.local_step >= called_at and crew.size < size:
            store.set("come", "")
            await_true(lambda: crew.wants_change)

    options = {**KINDS[name], "has_last_vote": has_last_vote}
    options["decay"] = 0.5 if rank == size - 1 else 0.1  # that of the others counts
    options["schedules"] = name not in ("estimates", "plain")  # else only groups carry settings
    return train(crew, seed=rank, size=size - 1, goal=goal, each=act, **options)


@pytest.mark.parametrize(
    ("name", "has_last_vote"),
    in_tiers(
        [
            ("residuals, momentum", False),
            ("estimates", False),
            ("muon and adamw", False),
            ("plain", True),
            ("momentum", True),
        ],
        lambda case: case in (("residuals, momentum", False), ("plain", True)),
    ),
)
def test_a_newcomer_begins_where_the_others_are(name: str, has_last_vote: bool) -> None:
    store = host_store()
    results = start(join_late, 3, store.port, name, has_last_vote)
    check_equal(results)
    last = results[-1]
    votes = max(results[0]["points"])
    assert len(results[0]["rosters"][votes][1]) == 3
    assert min(last["points"]) > STRUCK_AT
    assert last["points"][votes] == results[0]["points"][votes]
    assert last["rates"][0][1] == 0.1
    assert list_reasons(last) == {"local steps are shared at votes"}
    if has_last_vote:
        assert len({result["own"] for result in results}) == 1


def vote_on_nothing(rank: int, size: int, port: int) -> dict[str, Any]:
    """The last worker comes right after a vote, and the others call ``vote()`` at once."""
    store = connect(port)
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, max_workers=size)

    def act(optimizer: CrewLocalSteps) -> None:
        if optimizer.local_step == STRUCK_AT * EVERY and crew.size < size:
            store.set("come", "")
            await_true(lambda: crew.wants_change)
            before = crew.epoch.number
            optimizer.vote()
            assert crew.epoch.number == before and optimizer.committed_step == STRUCK_AT

    return train(crew, seed=rank, size=size - 1, each=act)


@pytest.mark.slow
def test_a_newcomer_is_not_let_in_where_nothing_is_voted_on_but_at_the_next_vote() -> None:
    store = host_store()
    results = start(vote_on_nothing, 3, store.port)
    check_equal(results)
    sizes = {vote: len(ids) for vote, (_, ids) in results[0]["rosters"].items()}
    assert sizes[STRUCK_AT] == 2
    assert sizes[STRUCK_AT + 1] == 3


def take_local_steps_meanwhile(rank: int, size: int, port: int) -> dict[str, Any]:
    """The first is killed; the second votes, and waits while the third takes local steps."""
    crew, store = make_crew(port, min_workers=2, max_workers=size), connect(port)
    waits = 0

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            store.set("waits", "")
        time.sleep(seconds)

    def monotonic() -> float:
        # Two seconds pass while it waits: a worker that only votes would be given up by then.
        return time.monotonic() + (2.0 if waits else 0.0)

    def act(optimizer: CrewLocalSteps) -> None:
        if optimizer.local_step != STRUCK_AT * EVERY + EVERY - 1:
            return
        if rank == 0:
            strike(store)
        elif rank == 1:
            membership.time = SimpleNamespace(monotonic=monotonic, sleep=sleep)  # type: ignore[assignment]
        else:
            await_true(lambda: store.check(["waits"]))

    result = train(crew, seed=rank, size=size, each=act, timeouts=distlion.Timeouts(step_s=20))
    return {**result, "struck": store.add("struck", 0)}


def test_survivors_wait_for_those_who_still_take_local_steps() -> None:
    store = host_store()
    dead, *results = start(take_local_steps_meanwhile, 3, store.port, may_die=True)
    assert [isinstance(each, Exception) for each in (dead, *results)] == [True, False, False]
    check_equal(results)
    for result in results:
        assert result["struck"] == 1
        formed = result["formed"][-1]
        assert "2 workers" in formed, formed


def replayed(rank: int, size: int, port: int, name: str) -> dict[str, Any]:
    """The first of four is killed in a local step; the last one comes later."""
    store = connect(port)
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2)

    def act(optimizer: CrewLocalSteps) -> None:
        step = optimizer.local_step
        if rank == 0 and step == STRUCK_AT * EVERY + 2:
            strike(store)
        if step >= (STRUCK_AT + 2) * EVERY + 1 and crew.size < size - 1:
            store.set("come", "")
            await_true(lambda: crew.wants_change)

    result = train(crew, seed=rank, size=size - 1, each=act, **KINDS[name])
    return {**result, "struck": store.add("struck", 0)}


def replay(results: list[dict[str, Any]], name: str) -> None:
    """Do all votes again, with the members that each of them had; compare after each."""
    rosters, points = {}, {}
    for result in results:
        rosters.update(result["rosters"])
        points.update(result["points"])
    members = rosters[1][1]
    seeds = {result["id"]: result["seed"] for result in results}
    # The first member's parameters count; the one that was killed is the only one not to say.
    model = make_model(seeds.get(members[0], 0))
    cluster = distlion.VirtualLocalSteps(
        model.parameters(),
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        workers=4,
        every=EVERY,
        **KINDS[name],
    )
    cluster.change_workers(members)
    for step in range(GOAL):
        for place, member in enumerate(members):
            for group in cluster.inners[place].param_groups:
                group["lr"] = 1e-2 * 0.99**step
            draw_loss(model, step, member).backward()
            cluster.collect(place)
        vote = (step + 1) // EVERY
        if (step + 1) % EVERY == 0 and rosters[vote][1] != members:
            members = rosters[vote][1]
            cluster.change_workers(members)
        cluster.step()
        if (step + 1) % EVERY == 0:
            assert bits(cluster.common_point) == points[vote], vote
    n_votes = GOAL // EVERY
    assert [len(rosters[vote][1]) for vote in (STRUCK_AT, n_votes)] == [3, 3]
    assert 2 in {len(ids) for _, ids in rosters.values()}
    for result in results:
        place = members.index(result["id"])
        assert bits(cluster.worker_params(place)) == result["own"]
        for key, kept in result["kept"].items():
            mine = [entry[key][place] for entry in cluster.outer_optimizer.state.values()]
            assert are_equal(mine, kept), key


@pytest.mark.parametrize(
    # Estimates do not tell a vote for nothing from none.
    "name",
    in_tiers(["residuals, momentum", "estimates"], lambda name: name != "estimates"),
)
def test_a_run_whose_members_changed_is_replayed_bit_for_bit(name: str) -> None:
    store = host_store()
    dead, *results = start(replayed, 4, store.port, name, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    assert all(result["struck"] == 1 for result in results)
    check_equal(results)
    replay(results, name)


def come_just_before_a_vote(rank: int, size: int, port: int) -> dict[str, Any]:
    """One worker asks as the others are about to vote; nobody looks at intervals."""
    lookout.LOOK_S = 3600.0
    store = connect(port)
    if rank == 2:
        store.get("about to vote")
    crew = make_crew(port, min_workers=2, max_workers=size)

    def act(optimizer: CrewLocalSteps) -> None:
        is_last = optimizer.committed_step == STRUCK_AT and optimizer.local_step % EVERY == 3
        if rank != 2 and is_last and crew.size < size:
            store.set("about to vote", "")
            await_true(lambda: bool(list_asks(crew._membership.rendezvous.store)))

    return train(crew, seed=rank, size=2, each=act)


def test_a_worker_that_asks_just_before_a_vote_is_let_in_at_it() -> None:
    store = host_store()
    results = start(come_just_before_a_vote, 3, store.port)
    check_equal(results)
    for result in results[:2]:
        assert len(result["rosters"][STRUCK_AT][1]) == 2
        assert len(result["rosters"][STRUCK_AT + 1][1]) == 3
