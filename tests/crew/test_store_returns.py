"""The store of a crew is lost, and training goes on: without it, and with the next one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import distlion
from cluster import WorkerDiedError
from crews import (
    OPTIONS,
    STRUCK_AT,
    await_true,
    check_equal,
    collect_log,
    host_store,
    is_halted,
    make_crew,
    make_model,
    start,
    train,
)
from distlion.crew import CrewLion
from distlion.crew.memory import GAP
from distlion.crew.store import MEMBERS_FIRST, Address
from distlion.errors import CheckpointError, CrewError

pytestmark = pytest.mark.distributed

GOAL = 45
BACK_AT = STRUCK_AT + 15
"""The step before which the next store is started."""


def keep_store(control: Any) -> None:
    """Keep the first store of the crew in a process of its own, which is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    control.set("port", str(store.port))
    control.set("pid", str(os.getpid()))
    control.wait(["over"])


@contextmanager
def next_store(control: Any, *keys: str) -> Iterator[list[Any]]:
    """Start the next store, at the same port, once it is asked for; list it.

    Args:
        control: The test's own store.
        *keys: Keys that the next store has from the beginning.
    """
    kept: list[Any] = []

    def make() -> None:
        await_true(lambda: control.check(["start"]) or control.check(["over"]), limit_s=100)
        if control.check(["start"]):
            port = int(control.get("port"))
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            for key in keys:
                store.set(key, "")
            kept.append(store)
            control.set("started", "")

    waiting = threading.Thread(target=make)
    waiting.start()
    try:
        yield kept
    finally:
        control.set("over", "")
        waiting.join()


def is_away(crew: distlion.Crew) -> bool:
    return crew._membership.rendezvous.is_away


def kill_store(control: Any) -> None:
    pid = int(control.get("pid"))
    os.kill(pid, signal.SIGKILL)
    await_true(lambda: is_halted(pid))
    control.set("struck", "")


def connect(rank: int, size: int, port: int) -> Any:
    """Connect to the test's own store; the last process keeps the crew's first one."""
    control = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        keep_store(control)
    return control


Act = Callable[[CrewLion, int], None]


def train_on(
    crew: distlion.Crew,
    control: Any,
    rank: int,
    members: int,
    act: Act,
    *,
    goal: int = GOAL,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Train; the first worker strikes the store, and asks for the next one.

    Args:
        crew: The crew.
        control: The test's own store.
        rank: This process.
        members: Members before the store is lost.
        act: Called after each step.
        goal: Steps.
        model: What to train; None makes one.
    """
    said = collect_log()

    def each(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if step == STRUCK_AT and rank == 0 and not control.check(["struck"]):
            kill_store(control)
        if step == STRUCK_AT:
            await_true(lambda: control.check(["struck"]) and is_away(crew))
        if step == BACK_AT and not control.check(["started"]):
            assert is_away(crew)
            if rank == 0:
                control.set("start", "")
            await_true(lambda: control.check(["started"]))
        act(optimizer, step)

    options = OPTIONS["feedback"]
    result = train(crew, options, seed=rank, size=members, goal=goal, each=each, model=model)
    return {**result, "said": said}


def outlive(rank: int, size: int, port: int) -> Any:
    """Two members train on without the store; a newcomer comes to the next one."""
    control = connect(rank, size, port)
    crew_port = int(control.get("port"))
    if rank == 2:
        control.wait(["back"])
    crew = make_crew(crew_port, min_workers=2)

    def act(optimizer: CrewLion, step: int) -> None:
        if step == BACK_AT and rank < 2:
            await_true(lambda: not is_away(crew))
            control.set("back", "")
        if step == GOAL - 2 and rank < 2:
            await_true(lambda: crew.size == 3 or crew.wants_change)

    return train_on(crew, control, rank, 2, act)


def test_members_train_on_without_the_store_and_a_newcomer_comes_to_the_next_one() -> None:
    control = host_store()
    with next_store(control):
        *results, dead = start(outlive, 4, control.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    assert control.check(["struck"])
    check_equal(results, goal=GOAL)
    for result in results[:2]:
        # No member changes because the store is lost, or back, but only as the newcomer comes.
        assert {*result["epochs"].values()} == {result["epochs"][2], result["epochs"][GOAL]}
        lost = [line for line in result["said"] if "training goes on" in line]
        back = [line for line in result["said"] if "is back after" in line]
        assert len(lost) == len(back) == 1
    first, last = results[0]["epochs"][2], results[0]["epochs"][GOAL]
    assert last[0] > first[0] + GAP
    assert len(last[1]) == 3
    assert max(last[1]) > GAP


def save_without(rank: int, size: int, port: int, folder: str, has_saved: bool) -> Any:
    """Save without the store, in an epoch with an earlier save or none, and in the next store."""
    control, model = connect(rank, size, port), make_model(rank)
    crew = make_crew(int(control.get("port")), min_workers=2)
    outcomes: list[str] = []

    def save(optimizer: CrewLion) -> None:
        try:
            distlion.save_checkpoint(folder, model, optimizer)
            outcomes.append("saved")
        except CheckpointError as error:
            outcomes.append(str(error))

    def act(optimizer: CrewLion, step: int) -> None:
        if step == STRUCK_AT - 1 and has_saved:
            save(optimizer)
        if step == STRUCK_AT + 5:
            assert is_away(crew)
            distlion.average_buffers(model)
            save(optimizer)
        if step == BACK_AT:
            await_true(lambda: not is_away(crew))
            save(optimizer)

    return {**train_on(crew, control, rank, 2, act, model=model), "outcomes": outcomes}


@pytest.mark.parametrize(
    "has_saved",
    [
        pytest.param(False, id="first save"),
        pytest.param(True, id="later save", marks=pytest.mark.slow),
    ],
)
def test_first_save_of_an_epoch_needs_the_store_and_its_failure_ends_nobody(
    tmp_path: Path, has_saved: bool
) -> None:
    control = host_store()
    with next_store(control):
        *results, dead = start(
            save_without, 3, control.port, str(tmp_path / "saved"), has_saved, may_die=True
        )
    assert isinstance(dead, WorkerDiedError)
    check_equal(results, goal=GOAL)
    for result in results:
        assert result["epochs"][2] == result["epochs"][GOAL]
        if has_saved:
            assert result["outcomes"] == ["saved"] * 3
        else:
            (failed, saved) = result["outcomes"]
            assert "the connections for checkpoints were not made" in failed
            assert saved == "saved"


def lose_one(rank: int, size: int, port: int, comes_back: bool) -> Any:
    """One of three members is killed while the store is away; the next store comes, or never."""
    control = connect(rank, size, port)
    store_wait_s = 50 if comes_back else 3
    crew = make_crew(int(control.get("port")), min_workers=2, store_wait_s=store_wait_s)

    def act(optimizer: CrewLion, step: int) -> None:
        if step == STRUCK_AT + 5 and rank == 2:
            assert is_away(crew)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == STRUCK_AT + 5 and rank == 0 and comes_back:
            control.set("start", "")

    try:
        return train_on(crew, control, rank, 3, act)
    except CrewError as error:
        return str(error)


def test_survivors_of_a_loss_wait_for_the_next_store_and_go_on() -> None:
    control = host_store()
    with next_store(control):
        *results, killed, dead = start(lose_one, 4, control.port, True, may_die=True)
    assert isinstance(killed, WorkerDiedError) and isinstance(dead, WorkerDiedError)
    check_equal(results, goal=GOAL)
    for result in results:
        assert len(result["epochs"][STRUCK_AT + 5][1]) == 3
        assert len(result["epochs"][GOAL][1]) == 2
        assert result["epochs"][GOAL][0] > GAP


def test_a_store_that_never_comes_back_ends_those_who_need_it() -> None:
    control = host_store()
    *ended, killed, dead = start(lose_one, 4, control.port, False, may_die=True)
    assert isinstance(killed, WorkerDiedError) and isinstance(dead, WorkerDiedError)
    for text in ended:
        assert "it stayed away for 3 s" in text
        assert "start it again and resume all workers from a checkpoint" in text


def come_late(rank: int, size: int, port: int) -> Any:
    """Workers 2 and 3 come to the next store before the members find it."""
    control = connect(rank, size, port)
    crew_port, look = int(control.get("port")), Address.look
    if rank >= 2:
        control.wait(["started"])
        crew = make_crew(crew_port, min_workers=2)
        return train(crew, OPTIONS["feedback"], seed=rank, size=2, goal=GOAL)
    crew = make_crew(crew_port, min_workers=2)

    def look_late(address: Address) -> None:
        if not control.check(["begun"]):
            raise ConnectionRefusedError
        look(address)

    Address.look = look_late  # type: ignore[method-assign]

    def act(optimizer: CrewLion, step: int) -> None:
        if step == BACK_AT and rank == 0:
            store = dist.TCPStore("127.0.0.1", crew_port, is_master=False)  # type: ignore[attr-defined]
            await_true(lambda: store.check(["distlion/run/begun"]))
            control.set("begun", "")
        if step == BACK_AT:
            await_true(lambda: crew.wants_change)

    try:
        return train_on(crew, control, rank, 2, act)
    except CrewError as error:
        return str(error)


@pytest.mark.slow
def test_a_store_in_which_newcomers_have_begun_another_run_ends_the_members() -> None:
    control = host_store()
    with next_store(control):
        *ended, third, fourth, dead = start(come_late, 5, control.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    for text in ended:
        assert "other workers have begun another run in it" in text
        assert "--members-first" in text
    check_equal([third, fourth], goal=GOAL)
    assert len(third["epochs"][GOAL][1]) == 2


def wait_for_members(rank: int, size: int, port: int) -> Any:
    """Workers 2 and 3 come first to a store that lets members come back first."""
    control = connect(rank, size, port)
    crew_port, look = int(control.get("port")), Address.look
    if rank >= 2:
        control.wait(["started"])
        said = collect_log()
        threading.Thread(
            target=lambda: (
                await_true(lambda: any("newcomers wait" in line for line in said))
                or control.set(f"waits {rank}", "")
            )
        ).start()
        crew = make_crew(crew_port, min_workers=2)
        return train(crew, OPTIONS["feedback"], seed=rank, size=2, goal=GOAL)
    crew = make_crew(crew_port, min_workers=2)

    def look_late(address: Address) -> None:
        if not control.check(["waits 2", "waits 3"]):
            raise ConnectionRefusedError
        look(address)

    Address.look = look_late  # type: ignore[method-assign]

    def act(optimizer: CrewLion, step: int) -> None:
        if step == BACK_AT:
            await_true(lambda: not is_away(crew))
        if step == GOAL - 2:
            await_true(lambda: crew.size == 4 or crew.wants_change)

    return train_on(crew, control, rank, 2, act)


def test_newcomers_wait_where_members_come_back_first() -> None:
    control = host_store()
    with next_store(control, MEMBERS_FIRST):
        *results, dead = start(wait_for_members, 5, control.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results, goal=GOAL)
    assert len(results[0]["epochs"][GOAL][1]) == 4
    assert min(results[2]["epochs"]) > BACK_AT
