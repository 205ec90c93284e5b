"""Members of several processes, over which FSDP2 shards the parameters."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from cluster import WorkerDiedError
from crews import await_members, await_true, check_equal, host_store, make_crew, start
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
