"""Workers are lost while an epoch is formed; the next one is formed without them."""

from __future__ import annotations

import os
import signal
from typing import Any, Literal, get_args

import pytest
import torch.distributed as dist

from cluster import WorkerDiedError
from crews import (
    OPTIONS,
    STRUCK_AT,
    await_members,
    await_true,
    check_equal,
    host_store,
    is_halted,
    make_crew,
    start,
    train,
)
from distlion import Timeouts, faults
from distlion.crew import CrewLion
from tiers import in_tiers

GOAL = 40
COME_BY = 25
Who = Literal["first", "another", "newcomer"]


def arm(crew: Any, point: faults.FormingPoint, step: int, how: signal.Signals) -> faults.Fault:
    """Let this process be struck at the point, once."""

    def strike(_: object) -> None:
        faults.disarm_all()
        os.kill(os.getpid(), how)

    return faults.arm(rank=crew.id, step=step, point=point, action=strike)


def strike_one(
    rank: int, size: int, port: int, who: Who, point: faults.FormingPoint, how: signal.Signals
) -> dict[str, Any]:
    """One worker is killed in a step, and another one while the next epoch is formed.

    A newcomer is struck while it joins, when nobody else is.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if who == "newcomer" and rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, max_workers=size)
    faults_here: list[faults.Fault] = []
    if who == "newcomer" and rank == size - 1:
        # From "broadcast" on it has the number of the others' step.
        step = STRUCK_AT + 1 if point in ("broadcast", "load") else 0
        store.set("pid", str(os.getpid()))
        faults_here.append(arm(crew, point, step, how))
    first: list[Any] = []
    state = {"is_done": False}
    n_first = size - (who == "newcomer")

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if step >= 1 and not first and crew.size == n_first:
            first.extend(crew.epoch.members)
        if step == STRUCK_AT and who == "newcomer":
            store.set("come", "")
            pid = int(store.get("pid"))
            await_true(lambda: crew.size == size or crew.wants_change or is_halted(pid))
        elif step == STRUCK_AT and not state["is_done"]:
            state["is_done"] = True
            if crew.id == first[-1].id:
                os.kill(os.getpid(), signal.SIGKILL)
            elif crew.id == first[0 if who == "first" else 1].id:
                store.set("pid", str(os.getpid()))
                arm(crew, point, step, how)
        if step == COME_BY:
            _wake(store, crew, size - (who != "newcomer"), how)

    result = train(
        crew,
        {**OPTIONS["majority"], "timeouts": Timeouts(init_s=3, step_s=4)},
        seed=rank,
        size=n_first,
        goal=GOAL,
        each=act,
    )
    n_fired = sum(fault.fired for fault in faults_here)
    return {**result, "first": [member.id for member in first], "n_fired": n_fired}


def _wake(store: Any, crew: Any, size: int, how: signal.Signals) -> None:
    """Wake who was stopped, and wait until it is back."""
    if how == signal.SIGSTOP:
        if store.check(["pid"]):
            os.kill(int(store.get("pid")), signal.SIGCONT)
        await_members(crew, size)


def play(who: Who, point: faults.FormingPoint, how: signal.Signals) -> None:
    store = host_store()
    outcomes = start(strike_one, 4, store.port, who, point, how, may_die=True)
    results = [outcome for outcome in outcomes if not isinstance(outcome, WorkerDiedError)]
    n_dead = (who != "newcomer") + (how == signal.SIGKILL)
    assert len(results) == len(outcomes) - n_dead
    check_equal(results, goal=GOAL)


@pytest.mark.parametrize(
    ("who", "point"),
    in_tiers(
        [("first", "arrive"), ("another", "connect"), ("first", "broadcast"), ("newcomer", "load")],
        lambda case: case[1] in ("connect", "load"),
    ),
)
def test_others_go_on_when_a_worker_is_killed_while_an_epoch_is_formed(
    who: Who, point: faults.FormingPoint
) -> None:
    play(who, point, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "point"),
    [
        (who, point)
        for who in get_args(Who)
        for point in faults.FORMING_POINTS
        if (who, point) != ("newcomer", "arrive")  # nobody has heard of it yet
    ],
)
def test_a_kill_at_every_point_of_forming(who: Who, point: faults.FormingPoint) -> None:
    play(who, point, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("point", faults.FORMING_POINTS)
@pytest.mark.parametrize("who", ["first", "another"])
def test_a_stop_at_every_point_of_forming(who: Who, point: faults.FormingPoint) -> None:
    play(who, point, signal.SIGSTOP)


def play_newcomer_that_is_stopped(point: faults.FormingPoint) -> None:
    """It is stopped while it joins, until the others have come to a step far from there."""
    store = host_store()
    *results, newcomer = start(strike_one, 4, store.port, "newcomer", point, signal.SIGSTOP)
    check_equal([*results, newcomer], goal=GOAL)
    assert newcomer["n_fired"] == 1
    assert newcomer["id"] in newcomer["epochs"][GOAL][1]
    assert len(newcomer["epochs"][GOAL][1]) == 4
    for result in results:
        assert result["epochs"][COME_BY][1] == tuple(sorted(result["first"]))
        assert result["epochs"][GOAL] == newcomer["epochs"][GOAL]


@pytest.mark.slow
def test_a_newcomer_that_is_stopped_while_it_joins_comes_in_when_it_wakes() -> None:
    play_newcomer_that_is_stopped("load")


@pytest.mark.slow
@pytest.mark.parametrize("point", [each for each in faults.FORMING_POINTS if each != "load"])
def test_a_newcomer_may_be_stopped_at_every_point_of_joining(point: faults.FormingPoint) -> None:
    play_newcomer_that_is_stopped(point)
