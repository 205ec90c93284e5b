"""A newcomer catches up while the others train, and they do not wait for its parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
from crews import (
    OPTIONS,
    STRUCK_AT,
    await_members,
    await_true,
    check_equal,
    collect_log,
    host_store,
    make_crew,
    make_model,
    start,
    stop_self,
    train,
    wake,
)
from distlion import faults
from distlion.crew import CrewLion
from distlion.kernels import Kernels, Segment
from distlion.step import bucket, gradients
from failures import count_looks_as_time, note_extensions

GOAL = 100
RATE = 8 * 256 / 0.03
"""Bits a second: the model takes many steps to come."""


def note_looks() -> list[int]:
    """Return a list that grows when this worker looks at its gradients, to compare them."""
    looks: list[int] = []

    def look(kernels: Kernels, segments: Sequence[Segment]) -> torch.Tensor:
        looks.append(len(segments))
        return gradients.look_at_gradients(kernels, segments)

    bucket.look_at_gradients = look  # type: ignore[attr-defined]
    return looks


def join_late(rank: int, size: int, port: int, name: str, admits: bool) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    said = collect_log()
    crew = make_crew(port, min_workers=2, max_workers=size, handover_rate=RATE)
    momenta: list[torch.Tensor] = []
    looked_at = note_looks()

    def note(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
        await_members(crew, size if optimizer.committed_step == GOAL - 2 else 0)
        if crew.size == size and not momenta:
            param = optimizer.param_groups[0]["params"][0]
            momenta.append(optimizer.state[param]["exp_avg"].clone())
        if crew.size < size:
            time.sleep(0.005)  # the newcomer has to replay some of these steps

    options = {"size": size - 1, "goal": GOAL, "each": note, "admits": admits}
    result = train(crew, OPTIONS[name], seed=rank, **options)
    return {**result, "momentum": momenta[0], "said": said, "looks": len(looked_at)}


def check_joined(results: list[dict[str, Any]]) -> str:
    """Check that the last one came while the others trained; return what it said of it."""
    check_equal(results, goal=GOAL)
    last = results[-1]
    assert min(last["digests"]) > STRUCK_AT
    (said,) = [line for line in last["said"] if "came while the others trained" in line]
    assert not any("joins while others wait" in line for line in last["said"])
    for result in results[:-1]:
        assert result["formed"][-1].endswith(f"left: nobody; came: worker {last['id']} (new)")
        assert result["traffic"]["members_lost"] == 0
    return said


@pytest.mark.parametrize("admits", [True, False])
def test_a_newcomer_catches_up_while_the_others_train(admits: bool) -> None:
    store = host_store()
    results = start(join_late, 3, store.port, "majority", admits)
    said = check_joined(results)
    assert int(said.split()[-2]) > 0  # replies
    for result in results[:2]:
        assert result["traffic"]["steps"] == GOAL  # no vote was cast twice
        assert result["given_up"] == (0 if admits else 1)  # backward passes
    assert not results[-1]["momentum"].any()
    assert results[0]["momentum"].any()
    # Gradients differ, so the members looked at them once; all would wait for a newcomer's look.
    assert [result["looks"] for result in results] == [1, 1, 0]


def compute_late(rank: int, size: int, port: int) -> dict[str, Any]:
    """A member computes for long just as the others leave their epoch for a newcomer."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, max_workers=size)
    note_extensions(store, "late")
    count_looks_as_time()
    waited: list[int] = []

    def act(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
            await_members(crew, size)
        if rank == 0 and optimizer.session.has_ended_epoch and not waited:
            waited.append(optimizer.committed_step)
            store.wait(["late/extended 2"])

    options = {**OPTIONS["majority"], "timeouts": distlion.Timeouts(step_s=60)}
    result = train(crew, options, seed=rank, size=size - 1, goal=2 * STRUCK_AT, each=act)
    return {**result, "waited": waited}


def test_a_member_that_is_slow_as_the_others_leave_keeps_its_place() -> None:
    store = host_store()
    results = start(compute_late, 4, store.port)
    check_equal(results, goal=2 * STRUCK_AT)
    assert results[0]["waited"] == [STRUCK_AT + 1]
    for result in results[:3]:
        assert result["traffic"]["members_lost"] == 0
        assert len(result["formed"]) == 2


def be_interrupted(rank: int, size: int, port: int) -> Any:
    """A member that was stopped catches up with the others, and is interrupted."""
    crew = make_crew(port, min_workers=2, max_workers=size, silence_s=2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    kept: list[torch.Tensor] = []
    alike: list[bool] = []

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def watch(form: Callable[..., None], *args: Any, **options: Any) -> None:
        try:
            form(*args, **options)
        except KeyboardInterrupt:  # before the crew ends
            alike.extend(map(torch.equal, model.parameters(), kept))
            raise

    def act(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT and not kept:
            kept.extend(param.detach().clone() for param in optimizer.list_all())
            optimizer.form = partial(watch, optimizer.form)  # type: ignore[method-assign]
            faults.arm(rank=crew.id, step=0, point="caught_up", action=interrupt)
            stop_self(store)
        if rank == 1 and optimizer.committed_step == STRUCK_AT + 5 and crew.size < size:
            wake(store)
        if rank and optimizer.committed_step == GOAL - 2:
            await_true(lambda: store.check(["interrupted"]))

    model = make_model(rank)
    options = {**OPTIONS["majority"], "timeouts": distlion.Timeouts(step_s=300, busy_s=300)}
    try:
        return train(crew, options, seed=rank, size=size, goal=GOAL, each=act, model=model)
    except KeyboardInterrupt:
        store.set("interrupted", "")
        return alike


def test_who_is_interrupted_as_it_catches_up_has_its_own_parameters() -> None:
    store = host_store()
    own, *others = start(be_interrupted, 3, store.port)
    assert own == [True] * 4
    check_equal(others, goal=GOAL)
