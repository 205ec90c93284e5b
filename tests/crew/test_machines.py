"""Members of several processes, over which FSDP2 shards the parameters."""

from __future__ import annotations

from typing import Any

from crews import check_equal, host_store, make_crew, start
from machines import LANES, connect_machine, replay, train_machine

GOAL = 12


def train_all(rank: int, size: int, port: int) -> dict[str, Any]:
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL)


def test_machines_of_a_crew_take_the_steps_of_whole_parameters() -> None:
    store = host_store()
    results = start(train_all, 2 * LANES, store.port)
    check_equal(results, goal=GOAL)
    (first,) = {result["epochs"][1][1][0] for result in results}
    (seed,) = {result["seed"] for result in results if result["id"] == first}
    replay(results, seed, GOAL)
