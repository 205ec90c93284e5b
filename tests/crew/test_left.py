"""A worker that leaves ``with crew`` keeps nobody waiting, whatever it still holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from crews import (
    GOAL,
    OPTIONS,
    STRUCK_AT,
    await_true,
    check_equal,
    collect_log,
    draw_loss,
    host_store,
    make_crew,
    make_model,
    start,
    train,
)
from distlion import Timeouts
from distlion.crew import CrewLion
from distlion.errors import CrewError


def leave_and_live_on(rank: int, size: int, port: int) -> Any:
    """Leave by an error on one worker, which keeps it and its optimizer until the others end."""
    crew = make_crew(port, min_workers=2, max_workers=size)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    losses: list[str] = []
    kept: list[object] = []
    note_loss = crew._membership.changes.note_loss

    def note(error: BaseException, *args: Any) -> None:
        losses.append(f"{type(error).__name__}: {error}")
        note_loss(error, *args)

    def fail(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            kept.append(optimizer)
            raise ValueError("the batch is bad")

    crew._membership.changes.note_loss = note  # type: ignore[method-assign]
    try:
        # Longer than the others may take.
        options = {**OPTIONS["majority"], "timeouts": Timeouts(step_s=40)}
        result = train(crew, options, seed=rank, each=fail)
    except ValueError as error:
        kept.append(error)
        await_true(lambda: store.check(["ended 1", "ended 2"]), limit_s=50)
        return dist.is_initialized()
    store.set(f"ended {rank}", "")
    return result, losses


def test_nobody_waits_for_a_worker_that_left_by_an_error_and_keeps_its_optimizer() -> None:
    store = host_store()
    has_group, *found = start(leave_and_live_on, 3, store.port)
    assert not has_group
    check_equal([result for result, _ in found])
    for result, losses in found:
        assert len(losses) == 1
        assert "left, and is no longer waited for" in losses[0]
        assert "ValueError: the batch is bad" in losses[0]
        assert len(result["epochs"][GOAL][1]) == 2


def give_up(rank: int, size: int, port: int, how: str) -> tuple[bool, bool, str]:
    """Return whether there is a process group inside of the crew, and after it."""
    crew, text = make_crew(port, min_workers=2), ""
    kept: list[object] = []

    def fail() -> None:
        raise CrewError("the store is gone")

    try:
        with crew:
            optimizer = crew.optimizer(
                make_model(rank).named_parameters(), timeouts=Timeouts(step_s=4)
            )
            inside = dist.is_initialized()
            if how == "finish fails":
                kept.append(optimizer)
                crew.finish = fail  # type: ignore[method-assign]
            del optimizer
    except CrewError as error:
        kept.append(error)
        text = str(error)
    return inside, dist.is_initialized(), text


@pytest.mark.parametrize(
    ("how", "text"), [("optimizer is freed", ""), ("finish fails", "the store is gone")]
)
def test_no_process_group_stays_behind(how: str, text: str) -> None:
    store = host_store()
    assert start(give_up, 2, store.port, how) == [(True, False, text)] * 2


def step_after(rank: int, size: int, port: int) -> tuple[str, int]:
    """Return the error of a step after the end, and the number of epochs."""
    crew, model = make_crew(port, min_workers=2), make_model(rank)
    with crew:
        optimizer = crew.optimizer(model.named_parameters(), timeouts=Timeouts(step_s=4))
        draw_loss(model, 0, rank).backward()
        optimizer.step()
    draw_loss(model, 1, rank).backward()
    with pytest.raises(CrewError) as caught:
        optimizer.step()
    return str(caught.value), optimizer.traffic.epochs_formed


def test_who_has_left_forms_no_epoch() -> None:
    store = host_store()
    for text, n_epochs in start(step_after, 2, store.port):
        assert "has left its crew" in text
        assert n_epochs == 1


def end_early(rank: int, size: int, port: int) -> Any:
    """End after fewer steps than the others on one worker, without an error."""
    crew, said = make_crew(port, min_workers=2, max_workers=size), collect_log()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    options = {**OPTIONS["majority"], "timeouts": Timeouts(step_s=4, busy_s=30)}

    def check_open(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT + 5:
            await_true(lambda: store.check(["ended early"]))
            crew._membership.rendezvous.check_open()

    goal = GOAL if rank else STRUCK_AT
    result = train(crew, options, seed=rank, goal=goal, each=check_open)
    store.set("ended early", "")
    return result, said


def test_nobody_waits_for_a_worker_that_has_finished_early() -> None:
    store = host_store()
    (early, said), *found = start(end_early, 3, store.port)
    assert early["epochs"].keys() == set(range(1, STRUCK_AT + 1))
    assert f"has finished at step {STRUCK_AT}, and the others train on without it" in "".join(said)
    check_equal([result for result, _ in found])
    for result, lines in found:
        assert len(result["epochs"][GOAL][1]) == 2
        why = f"worker {early['id']} (left by itself, it has finished at step {STRUCK_AT})"
        assert any(why in line for line in lines)
