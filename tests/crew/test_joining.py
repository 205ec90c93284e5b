"""A newcomer catches up while the others train, and they do not wait for its parameters."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from crews import (
    OPTIONS,
    STRUCK_AT,
    await_members,
    check_equal,
    collect_log,
    host_store,
    make_crew,
    start,
    train,
)
from distlion.crew import CrewLion

GOAL = 400


def join_late(rank: int, size: int, port: int, name: str) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    crew, said = make_crew(port, min_workers=2, max_workers=size), collect_log()
    momenta: list[torch.Tensor] = []

    def note(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
        await_members(crew, size if optimizer.committed_step == GOAL - 1 else 0)
        if crew.size == size and not momenta:
            param = optimizer.param_groups[0]["params"][0]
            momenta.append(optimizer.state[param]["exp_avg"].clone())
        if crew.size < size:
            time.sleep(0.005)  # the newcomer has to replay some of these steps

    result = train(crew, OPTIONS[name], seed=rank, size=size - 1, goal=GOAL, each=note)
    return {**result, "momentum": momenta[0], "said": said}


def check_joined(results: list[dict[str, Any]]) -> str:
    """Check that the last one came without a pause; return what it said of it."""
    check_equal(results, goal=GOAL)
    last = results[-1]
    assert min(last["digests"]) > STRUCK_AT
    (said,) = [line for line in last["said"] if "came without a pause" in line]
    assert not any("joins while others wait" in line for line in last["said"])
    for result in results[:-1]:
        assert result["formed"][-1].endswith(f"left: nobody; came: worker {last['id']} (new)")
        assert result["traffic"]["members_lost"] == 0
    return said


def test_a_newcomer_catches_up_while_the_others_train() -> None:
    store = host_store()
    results = start(join_late, 3, store.port, "majority")
    said = check_joined(results)
    assert int(said.split()[-2]) > 0  # replies
    assert not results[-1]["momentum"].any()
    assert results[0]["momentum"].any()
