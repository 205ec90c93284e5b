"""A worker that is killed while several save leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from checkpoint.runs import Tensors, Worker
from cluster import WorkerDiedError, run_workers
from distlion import errors, faults
from distlion.checkpoint import verify_checkpoint
from tiers import in_tiers

pytestmark = pytest.mark.distributed

WORKERS = 3
# From here on the new checkpoint is the latest.
NEW = ("replaced latest", "pruned")
# The first of a folder seals and publishes; each of the others writes its files only.
QUICK = {0: ("renamed the folder",), 1: ("finished model-00001.safetensors",)}


def save_twice(
    rank: int, world_size: int, folder: str, victim: int, place: str | None, in_background: bool
) -> tuple[list[str], list[Tensors]]:
    """Save at steps 1 and 2; the victim dies at a place of its second save."""
    places: list[str] = []

    def strike(subject: object) -> None:
        places.append(str(subject))
        if subject == place:
            os.kill(os.getpid(), signal.SIGKILL)

    worker, states = Worker(rank), []
    if rank == victim or place is None:
        faults.arm(rank=rank, step=2, point="checkpoint", action=strike)
    for step in (1, 2):
        worker.train(step - 1, step)
        worker.save(folder, keep_last=1, async_=in_background)
        states.append(worker.tensors())
    return places, states


def load_and_go_on(rank: int, world_size: int, folder: str) -> tuple[int, Tensors, int]:
    """Load, and return what there was; train and save again, and return what that left."""
    worker = Worker(rank)
    step = worker.load(folder).step
    tensors = worker.tensors()
    worker.train(step, step + 1)
    worker.save(folder, keep_last=1)
    return step, tensors, len(os.listdir(folder))


@functools.cache
def undisturbed() -> list[tuple[list[str], list[Tensors]]]:
    """Return, for each rank, the places of a save, and its states after steps 1 and 2."""
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(save_twice, WORKERS, folder, 0, None, False)


def strike(root: Path, victim: int, place: str, *, in_background: bool = False) -> None:
    """Kill a worker at a place of a save, and see what the others, and the disk, are left with."""
    outcomes = run_workers(
        save_twice, WORKERS, str(root), victim, place, in_background, may_die=True
    )
    assert isinstance(outcomes[victim], WorkerDiedError)  # so the fault has fired
    for rank, outcome in enumerate(outcomes):
        if rank != victim and place != "pruned":
            assert isinstance(outcome, errors.PeerLostError), (victim, place, rank, outcome)
    assert not verify_checkpoint(root).problems
    expected = 2 if place in NEW else 1
    for rank, (step, tensors, n_left) in enumerate(run_workers(load_and_go_on, WORKERS, str(root))):
        assert step == expected, (victim, place)
        state = undisturbed()[rank][1][expected - 1]
        assert all(map(torch.equal, tensors, state)), (victim, place, rank)
        assert rank or n_left == 2  # latest, and what it names; rank 0 removes what was before


@pytest.mark.parametrize("victim", in_tiers(QUICK, lambda victim: victim == 0))
def test_a_worker_that_is_killed_in_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, victim: int
) -> None:
    for place in QUICK[victim]:
        strike(tmp_path, victim, place)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("victim", range(WORKERS))
def test_a_worker_that_is_killed_anywhere_in_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, victim: int, in_background: bool
) -> None:
    places = undisturbed()[victim][0]
    assert len(places) == len(set(places)) >= 10
    assert (NEW[0] in places) == (victim == 0)
    # All that the first one does after the files are written, and every third place before.
    chosen = {*places[::3], *(place for place in places[-8:] if victim == 0)}
    for number, place in enumerate(sorted(chosen, key=places.index)):
        strike(tmp_path / str(number), victim, place, in_background=in_background)
