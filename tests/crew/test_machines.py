"""Members of several processes, over which FSDP2 shards the parameters."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError
from crews import (
    await_members,
    await_true,
    check_equal,
    host_store,
    make_crew,
    start,
    stop_self,
    wake,
)
from distlion import faults
from distlion.crew import CrewLion
from distlion.errors import CrewError
from machines import LANES, connect_machine, replay, train_machine

STRUCK_AT, CALLED_AT, COME_BY, GOAL = 4, 7, 10, 14


def train_all(rank: int, size: int, port: int) -> dict[str, Any]:
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL)


def find_seed(results: list[dict[str, Any]]) -> int:
    """Return the seed of the machine whose parameters all have taken."""
    first = results[0]["epochs"][1][1][0]
    return next((each["seed"] for each in results if each["id"] == first), 0)


def test_machines_of_a_crew_take_the_steps_of_whole_parameters() -> None:
    store = host_store()
    results = start(train_all, 2 * LANES, store.port)
    check_equal(results, goal=GOAL)
    replay(results, find_seed(results), GOAL)


def lose_and_join(rank: int, size: int, port: int, lane_lost: int, point: Any) -> dict[str, Any]:
    """Of one machine a process is killed in a step; another machine comes later."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    n_first = size // LANES - 1
    if machine == n_first:
        store.wait(["come"])
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2, silence_s=2)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if (machine, lane) == (0, lane_lost) and step == STRUCK_AT and not faults.armed:
            faults.arm(
                rank=optimizer.session.ranks.rank,
                step=step,
                point=point,
                action=lambda _: os.kill(os.getpid(), signal.SIGKILL),
            )
        if step == CALLED_AT or crew.size < n_first:
            store.set("come", "")
        if step == COME_BY and crew.lane == 0:
            await_members(crew, n_first)

    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL, size=n_first, each=act)


def check_lost(results: list[Any], lane_lost: int, *, machines: int) -> None:
    """Check what became of the machine that has lost a process, and of all others."""
    assert isinstance(results[lane_lost], WorkerDiedError)
    left = results[1 - lane_lost]
    assert isinstance(left, CrewError), left
    assert f"of its {LANES} processes these are lost: {lane_lost}" in str(left)
    others = results[LANES:]
    check_equal(others, goal=GOAL)
    replay(others, find_seed(others), GOAL)
    sizes = {step: len(ids) for result in others for step, (_, ids) in result["epochs"].items()}
    assert (sizes[STRUCK_AT], sizes[CALLED_AT], sizes[GOAL]) == (machines, machines - 1, machines)


@pytest.mark.parametrize(
    ("lane", "point"),
    [
        (1, "framed"),
        pytest.param(0, "framed", marks=pytest.mark.slow),
        pytest.param(0, "before_commit", marks=pytest.mark.slow),
        pytest.param(1, "after_commit", marks=pytest.mark.slow),
        pytest.param(1, "before_step", marks=pytest.mark.slow),
    ],
)
def test_machine_that_loses_a_process_leaves_and_another_comes(lane: int, point: Any) -> None:
    store = host_store()
    results = start(lose_and_join, 4 * LANES, store.port, lane, point, may_die=True, timeout_s=120)
    check_lost(results, lane, machines=3)


def lose_while_members_change(
    rank: int, size: int, port: int, lane_lost: int, point: faults.FormingPoint
) -> dict[str, Any]:
    """A machine comes, and a process of another one is killed while all form an epoch with it."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    n_first = size // LANES - 1
    if machine == n_first:
        store.wait(["come"])
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if (machine, lane) == (0, lane_lost) and step >= STRUCK_AT:
            faults.disarm_all()
            kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            faults.arm(rank=crew.id, step=step, point=point, action=kill)
        if step == CALLED_AT:
            store.set("come", "")
        if step >= COME_BY and crew.lane == 0 and machine > 0:
            await_true(lambda: max(crew.epoch.roster.ids) == n_first or crew.wants_change)

    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL, size=n_first, each=act)


@pytest.mark.parametrize(
    ("lane", "point"),
    [
        (0, "roster"),
        pytest.param(1, "arrive", marks=pytest.mark.slow),
        pytest.param(1, "roster", marks=pytest.mark.slow),
        pytest.param(0, "connect", marks=pytest.mark.slow),
        pytest.param(1, "connect", marks=pytest.mark.slow),
        pytest.param(1, "broadcast", marks=pytest.mark.slow),
        pytest.param(0, "load", marks=pytest.mark.slow),
    ],
)
def test_machine_that_loses_a_process_while_an_epoch_is_formed_leaves(
    lane: int, point: faults.FormingPoint
) -> None:
    store = host_store()
    results = start(
        lose_while_members_change, 4 * LANES, store.port, lane, point, may_die=True, timeout_s=120
    )
    assert isinstance(results[lane], WorkerDiedError)
    assert isinstance(results[1 - lane], CrewError | RuntimeError), results[1 - lane]
    others = results[LANES:]
    check_equal(others, goal=GOAL)
    replay(others, find_seed(others), GOAL)
    ids = {ids for result in others for step, (_, ids) in result["epochs"].items() if step == GOAL}
    lost = results[2]["epochs"][1][1]
    assert {len(each) for each in ids} == {3}
    assert {len({*each} & {*lost}) for each in ids} == {2}


def be_stopped(rank: int, size: int, port: int, lane_stopped: int) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2, silence_s=2)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if (machine, lane) == (0, lane_stopped) and step == STRUCK_AT and not faults.armed:
            own = optimizer.session.ranks.rank
            faults.arm(rank=own, step=step, point="before_step", action=lambda _: stop_self(store))
        if rank == 2 and step == COME_BY:
            wake(store)

    long = distlion.Timeouts(step_s=300, busy_s=300, init_s=300)
    options = {"timeouts": long}
    return train_machine(crew, mesh, options, seed=machine, goal=GOAL, size=size // 2, each=act)


@pytest.mark.parametrize("lane", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_machine_one_of_whose_processes_is_silent_leaves(lane: int) -> None:
    store = host_store()
    results = start(be_stopped, 3 * LANES, store.port, lane, may_die=True, timeout_s=120)
    for left in results[:LANES]:
        assert isinstance(left, CrewError), left
        assert f"of its {LANES} processes these are lost: {lane}" in str(left)
    check_equal(results[LANES:], goal=GOAL)
    for result in results[LANES:]:
        assert "(silent)" in result["formed"][-1]


def hold_one(rank: int, size: int, port: int) -> dict[str, Any]:
    """A process of a machine is late to the end of a step, and meanwhile another machine is lost.

    The others have all that is theirs, and wait for the late one, which has all too.
    """
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if step != STRUCK_AT or faults.armed:
            return
        ranks = optimizer.session.ranks
        if (machine, lane) == (0, 1):
            faults.arm(rank=ranks.rank, step=step, point="before_commit", action=kill)
        if (machine, lane) == (1, 0):
            assert ranks.watch is not None
            wait = ranks.watch.alarmed.wait
            faults.arm(rank=ranks.rank, step=step, point="counted", action=lambda _: wait(30))

    options = {"exchange": distlion.AllGather()}
    return train_machine(crew, mesh, options, seed=machine, goal=GOAL, size=size // 2, each=act)


def test_machine_commits_a_step_on_all_its_processes_although_another_one_is_lost() -> None:
    store = host_store()
    results = start(hold_one, 3 * LANES, store.port, may_die=True, timeout_s=120)
    assert isinstance(results[1], WorkerDiedError)
    check_equal(results[LANES:], goal=GOAL)
    replay(results[LANES:], find_seed(results[LANES:]), GOAL)
