"""Options that crews of machines with several processes refuse, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distlion
from crews import check_equal, host_store, make_crew, make_model, start
from distlion.crew import CrewLion
from distlion.errors import CrewError, DistlionError
from machines import LANES, connect_machine, shard, train_machine

STRUCK_AT, GOAL = 4, 14


def come_with_others(rank: int, size: int, port: int) -> Any:
    """A machine of another number of processes comes to a crew that trains."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    is_odd = rank == size - 1
    if is_odd:
        store.wait(["come"])
    mesh = connect_machine(port, str(machine), lane, lanes=1 if is_odd else LANES)
    crew = make_crew(port, member=mesh, min_workers=2)
    if is_odd:
        try:
            with crew:
                crew.optimizer(shard(make_model(0), mesh).named_parameters())
        except CrewError as error:
            return str(error)
        finally:
            store.set("refused", "")

    def act(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
            store.wait(["refused"])

    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL, each=act)


@pytest.mark.slow
def test_machine_of_another_number_of_processes_is_refused_with_both_numbers() -> None:
    store = host_store()
    *results, refused = start(come_with_others, 2 * LANES + 1, store.port)
    assert "has 2 processes, and this one 1 process" in refused
    assert "--nproc-per-node 2" in refused
    check_equal(results, goal=GOAL)
    assert {len(ids) for result in results for _, ids in result["epochs"].values()} == {2}


def try_refused(rank: int, size: int, port: int) -> dict[str, str]:
    mesh = connect_machine(port, "alone", 0, lanes=1)
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except DistlionError as error:
            found[name] = f"{type(error).__name__}: {error}"

    crew = make_crew(port, member=mesh.get_group())
    params = list(shard(make_model(0), mesh).named_parameters())
    options = {
        "overlap": True,
        "agreement": distlion.Agreement(every=10),
        "replicas": distlion.Replicas(on_mismatch="repair"),
        "nodes": distlion.Nodes(ranks_per_node=1),
        "momentum_sync": distlion.MomentumSync(every=10),
    }
    for name, value in options.items():
        note(name, partial(crew.optimizer, params, **{name: value}))
    mixed = [("more", nn.Parameter(torch.ones(3))), *params]
    note("whole", partial(crew.optimizer, mixed))
    sharded = shard(make_model(0), other)
    note("mesh", partial(crew.optimizer, sharded.named_parameters()))
    inner = partial(torch.optim.AdamW, [each for _, each in params])
    note("local steps", lambda: crew.local_steps(inner(), every=4))
    note("two dims", partial(make_crew, port, member=other))
    note("alone", lambda: make_crew(port).optimizer(params))
    return found


def test_what_a_machine_cannot_have_is_refused_by_name() -> None:
    store = host_store()
    (found,) = start(try_refused, 1, store.port)
    for name in ("overlap", "agreement"):
        assert f"{name}=" in found[name] and "leave it out" in found[name]
    assert "on_mismatch='raise'" in found["replicas"]
    assert "pass Crew(member=...)" in found["nodes"]
    assert "momentum_sync= cannot be used" in found["momentum_sync"]
    assert "more is a plain tensor" in found["whole"] and "fully_shard" in found["whole"]
    assert "expected a mesh of one dim with the processes of this member" in found["mesh"]
    assert "use crew.optimizer()" in found["local steps"]
    assert "a mesh of one dim, of all processes of this member" in found["two dims"]
    assert "Crew(member=...)" in found["alone"]
