"""Workers of a crew are lost; the others train on, equal to the last bit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError
from crews import (
    GOAL,
    OPTIONS,
    STRUCK_AT,
    await_members,
    check_equal,
    draw_loss,
    host_store,
    make_crew,
    make_model,
    start,
    train,
)
from distlion import faults
from distlion.crew import CrewLion
from distlion.errors import CrewError, ReplicaMismatchError, StepError
from failures import count_looks_as_time, note_extensions
from tiers import in_tiers


def die_at(rank: int, size: int, port: int, name: str, point: faults.Point) -> dict[str, Any]:
    crew = make_crew(port, min_workers=2, max_workers=size)
    if rank == 0:  # it arms the fault for itself: its place is known once the epoch is formed

        def die(optimizer: CrewLion) -> None:
            if optimizer.committed_step == STRUCK_AT and not faults.armed:
                faults.arm(
                    rank=crew.rank,
                    step=STRUCK_AT,
                    point=point,
                    action=lambda _: os.kill(os.getpid(), signal.SIGKILL),
                )

        return train(crew, OPTIONS[name], seed=rank, each=die)
    return train(crew, OPTIONS[name], seed=rank)


@pytest.mark.parametrize(
    ("name", "point"),
    in_tiers(
        [
            ("majority", "before_step"),
            ("feedback", "before_commit"),
            ("server", "framed"),
            ("overlap", "after_encode"),
            ("majority", "after_commit"),
        ],
        lambda case: case[0] in ("feedback", "overlap"),
    ),
)
def test_others_go_on_when_a_worker_is_killed(name: str, point: faults.Point) -> None:
    store = host_store()
    dead, *results = start(die_at, 3, store.port, name, point, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results)
    for result in results:
        before, after = result["epochs"][STRUCK_AT], result["epochs"][GOAL]
        assert before[0] < after[0]
        assert len(before[1]) == 3
        assert len(after[1]) == 2
        (lost,) = set(before[1]) - set(after[1])
        assert f"left: worker {lost} (connection closed); came: nobody" in result["formed"][-1]
        check_counts(result, members=2, lost=1)


def check_counts(result: dict[str, Any], *, members: int, lost: int) -> None:
    """Check how a worker's traffic describes the changes that it has seen."""
    traffic, formed = result["traffic"], result["formed"]
    last = max(result["epochs"])
    assert (traffic["epoch"], traffic["members"]) == (result["epochs"][last][0], members)
    assert traffic["members_lost"] == lost
    assert traffic["epochs_formed"] == len(formed) > 1
    seconds = sum(float(line.split(" formed in ")[1].split()[0]) for line in formed)
    # The log rounds to hundredths.
    assert traffic["forming_s"] == pytest.approx(seconds, abs=0.005 * len(formed) + 1e-9)
    assert traffic["steps"] >= last - min(result["epochs"]) + 1


def leave_with_an_error(rank: int, size: int, port: int) -> dict[str, Any]:
    crew = make_crew(port, min_workers=2, max_workers=size)

    def fail(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            raise ValueError("the batch\nis bad")

    return train(crew, OPTIONS["majority"], seed=rank, each=fail)


@pytest.mark.slow
def test_log_has_the_words_of_a_worker_that_left_by_itself() -> None:
    store = host_store()
    left, *results = start(leave_with_an_error, 3, store.port, may_die=True)
    assert isinstance(left, ValueError)
    check_equal(results)
    for result in results:
        assert (
            "(left by itself, ValueError: the batch is bad); came: nobody" in result["formed"][-1]
        )
        check_counts(result, members=2, lost=1)


def differ(rank: int, size: int, port: int, on_mismatch: str) -> Any:
    """Parameters of one survivor are changed by hand; then another worker is killed."""
    # A pair that lost contact would form a crew of two: no majority could name who differs.
    crew = make_crew(port, min_workers=size - 1, max_workers=size)
    is_struck = False

    def act(optimizer: CrewLion) -> None:
        nonlocal is_struck
        if optimizer.committed_step == STRUCK_AT and not is_struck:
            is_struck = True
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                optimizer.param_groups[0]["params"][1].data[3] += 1

    options = {**OPTIONS["majority"], "replicas": distlion.Replicas(5, on_mismatch)}
    try:
        return train(crew, options, seed=rank, size=size, each=act)
    except ReplicaMismatchError as error:
        return str(error), error.culprits, crew.epoch.roster.ids.index(crew.id)


def test_survivors_whose_parameters_differ_are_told_and_nothing_is_overwritten() -> None:
    store = host_store()
    dead, *found = start(differ, 4, store.port, "raise", may_die=True)
    assert isinstance(dead, WorkerDiedError)
    for text, culprits, _ in found:
        assert "replicas differ in 0.bias" in text
        assert len(culprits) == 1


@pytest.mark.slow
def test_where_replicas_are_repaired_survivors_take_what_the_majority_has() -> None:
    store = host_store()
    dead, *results = start(differ, 4, store.port, "repair", may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results)


def count_sockets() -> int:
    """Count the sockets of this process; one may close meanwhile."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith("socket:") for path in paths if os.path.lexists(path))


def close(rank: int, size: int, port: int) -> Any:
    crew = make_crew(port, min_workers=2, max_workers=size)
    before = 0

    def act(optimizer: CrewLion) -> None:
        nonlocal before
        if optimizer.committed_step == STRUCK_AT:
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            before = before or count_sockets()
        while optimizer.committed_step == GOAL - 1 and count_sockets() >= before:
            crew._membership.ended.wait(0.05)

    options = {**OPTIONS["overlap"], "timeouts": distlion.Timeouts(init_s=3, step_s=4)}
    return train(crew, options, seed=rank, size=size, each=act), before, count_sockets()


def test_connections_of_an_epoch_that_is_over_are_closed() -> None:
    store = host_store()
    dead, *results = start(close, 3, store.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    for _, before, after in results:
        assert 0 < after < before


def be_stopped(rank: int, size: int, port: int) -> dict[str, Any]:
    crew = make_crew(port, min_workers=2, max_workers=size)
    goal, woken = 40, []

    def act(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT and not woken:
            woken.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if first and crew.size < size and not woken:
            woken.append(True)
            before = {member.id: member for member in first}
            gone = before.keys() - {member.id for member in crew.epoch.members}
            os.kill(before[gone.pop()].pid, signal.SIGCONT)
        if rank and crew.size == size and not first:
            first.extend(crew.epoch.members)
        await_members(crew, size if optimizer.committed_step == goal - 2 else 0)

    first: list[Any] = []
    return {**train(crew, OPTIONS["majority"], seed=rank, goal=goal, each=act), "struck": woken}


@pytest.mark.slow
def test_a_worker_that_was_stopped_comes_back_with_the_parameters_of_the_others() -> None:
    store = host_store()
    results = start(be_stopped, 3, store.port)
    check_equal(results, goal=40)
    assert results[0]["struck"]
    assert len(results[0]["epochs"][40][1]) == 3
    assert STRUCK_AT + 1 not in results[0]["digests"] or len(results[0]["digests"]) < 40
    stopped = results[0]["id"]
    for result in results[1:]:
        assert any(f"left: worker {stopped} (silent); " in line for line in result["formed"])
    for result in results:
        assert any(f"came: worker {stopped} (back)" in line for line in result["formed"])


def be_busy(rank: int, size: int, port: int) -> dict[str, Any]:
    """Evaluate, say, on one member alone, for longer than a silent one has."""
    crew = make_crew(port, min_workers=2, max_workers=size)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    note_extensions(store, "busy")
    count_looks_as_time()

    def act(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT and crew.size == size:
            store.wait(["busy/extended 2"])

    return train(
        crew, {**OPTIONS["majority"], "timeouts": distlion.Timeouts(step_s=60)}, seed=rank, each=act
    )


@pytest.mark.slow
def test_a_member_that_is_busy_elsewhere_is_waited_for() -> None:
    store = host_store()
    results = start(be_busy, 3, store.port)
    check_equal(results)
    for result in results:
        assert len(result["epochs"][STRUCK_AT][1]) == 3
        assert result["epochs"][STRUCK_AT + 1] == result["epochs"][STRUCK_AT]


def lose_all_others(rank: int, size: int, port: int) -> Any:
    endpoint, secret = f"127.0.0.1:{port}", "of this test"
    crew = distlion.Crew(endpoint, secret=secret, min_workers=2, wait_timeout_s=8)

    def die(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(crew, OPTIONS["majority"], seed=rank, size=size, each=die)


def test_one_worker_never_trains_alone() -> None:
    store = host_store()
    dead, error = start(lose_all_others, 2, store.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    assert isinstance(error, CrewError)
    assert "fewer than 2 workers" in str(error)


def give_a_step_up(rank: int, size: int, port: int) -> tuple[int, bytes]:
    """One is killed when votes have left in backward; the others reset their gradients."""
    crew, model, has_given_up = make_crew(port, min_workers=2, max_workers=size), make_model(0), 0
    with crew:
        optimizer = crew.optimizer(
            model.named_parameters(),
            lr=1e-2,
            timeouts=distlion.Timeouts(step_s=4),
            **OPTIONS["overlap"],
        )
        while optimizer.committed_step < GOAL:
            await_members(crew, size if optimizer.committed_step == 1 else 0)
            draw_loss(model, optimizer.committed_step, crew.id).backward()
            if optimizer.committed_step == STRUCK_AT and not has_given_up:
                has_given_up += 1
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                assert all(param.grad is None for param in model.parameters())
                continue
            optimizer.step()
            optimizer.zero_grad()
    return has_given_up, b"".join(bytes(param.detach().numpy()) for param in model.parameters())


def test_a_loss_where_a_step_is_given_up_ends_nobody() -> None:
    store = host_store()
    dead, *results = start(give_a_step_up, 3, store.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    assert [has_given_up for has_given_up, _ in results] == [1, 1]
    assert len({digest for _, digest in results}) == 1


def lose_one_in_a_save(rank: int, size: int, port: int, folder: Path) -> tuple[list[str], Any]:
    """One is killed while all save a checkpoint, as the guide has it."""
    crew, model, failed = make_crew(port, min_workers=2, max_workers=size), make_model(0), []
    hook = sys.excepthook
    with crew:
        optimizer = crew.optimizer(
            model.named_parameters(), lr=1e-2, timeouts=distlion.Timeouts(step_s=4)
        )
        while optimizer.committed_step < GOAL:
            await_members(crew, size if optimizer.committed_step == 1 else 0)
            draw_loss(model, optimizer.committed_step, crew.id).backward()
            if optimizer.step() and optimizer.committed_step in (STRUCK_AT, GOAL):
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    distlion.save_checkpoint(folder, model, optimizer)
                except StepError as error:
                    failed.append(type(error).__name__)
            optimizer.zero_grad()
    assert sys.excepthook is hook  # torch puts one more before it for each group
    return failed, b"".join(bytes(param.detach().numpy()) for param in model.parameters())


@pytest.mark.slow
def test_a_loss_while_a_checkpoint_is_saved_ends_nobody_who_expects_it(tmp_path: Path) -> None:
    store = host_store()
    folder = tmp_path / "checkpoint"
    dead, *results = start(lose_one_in_a_save, 3, store.port, folder, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    assert [failed for failed, _ in results] == [["PeerLostError"]] * 2
    assert len({digest for _, digest in results}) == 1
    assert folder.exists()
