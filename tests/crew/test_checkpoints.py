"""Checkpoints of a crew: saved in any epoch, resumed by a crew of any size."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from cluster import WorkerDiedError
from crews import OPTIONS, await_members, draw_loss, host_store, make_crew, make_model, start
from distlion.errors import CheckpointError
from tiers import in_tiers

LOST_AT, SAVED_AT, GOAL = 5, 10, 20


def train_and_save(rank: int, size: int, port: int, folder: str) -> Any:
    """One worker is lost; the others save in the epoch after it."""
    model, crew = make_model(rank), make_crew(port, min_workers=2)
    with crew:
        optimizer = crew.optimizer(model.named_parameters(), lr=1e-2, **OPTIONS["feedback"])
        await_members(crew, size)
        while crew.size < size:
            optimizer.step()  # the others have come meanwhile
            optimizer.zero_grad()
            await_members(crew, size)
        while optimizer.committed_step < SAVED_AT:
            if rank == 0 and optimizer.committed_step >= LOST_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            draw_loss(model, optimizer.committed_step, crew.id).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert crew.size == size - 1
        distlion.save_checkpoint(folder, model, optimizer)
    return [param.detach().clone() for param in model.parameters()]


def resume(rank: int, size: int, port: int, folder: str, on_world_change: Any) -> Any:
    model, crew = make_model(rank + 10), make_crew(port, min_workers=size, run_id="again")
    with crew:
        optimizer = crew.optimizer(model.named_parameters(), lr=1e-2, **OPTIONS["feedback"])
        found = distlion.load_checkpoint(folder, model, optimizer, on_world_change=on_world_change)
        loaded = [param.detach().clone() for param in model.parameters()]
        while optimizer.committed_step < GOAL:
            draw_loss(model, optimizer.committed_step, crew.id).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.verify_replicas()
    return found.step, loaded, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("size", "on_world_change"), in_tiers([(2, "raise"), (3, "mean")], lambda case: case[0] == 3)
)
def test_a_crew_resumes_what_a_crew_has_saved(
    tmp_path: Path, size: int, on_world_change: str
) -> None:
    store, folder = host_store(), str(tmp_path / "saved")
    dead, *saved = start(train_and_save, 3, store.port, folder, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    outcomes = start(resume, size, store.port, folder, on_world_change)
    for step, loaded, trained in outcomes:
        assert step == SAVED_AT
        assert all(map(torch.equal, loaded, saved[0]))
        assert all(map(torch.equal, trained, outcomes[0][2]))
        assert not all(map(torch.equal, trained, loaded))


def refuse(rank: int, size: int, port: int, folder: str) -> str:
    try:
        resume(rank, size, port, folder, "raise")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_another_number_of_members_has_to_be_allowed(tmp_path: Path) -> None:
    store, folder = host_store(), str(tmp_path / "saved")
    start(train_and_save, 3, store.port, folder, may_die=True)
    assert all("on_world_change" in said for said in start(refuse, 3, store.port, folder))
