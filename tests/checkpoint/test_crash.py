"""A save that is killed anywhere leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from checkpoint.runs import Run
from cluster import WorkerDiedError, run_workers
from distlion import errors, faults
from distlion.checkpoint import writer
from tiers import in_tiers

pytestmark = pytest.mark.distributed


def save_twice(rank: int, world_size: int, folder: str, kill_at: int) -> int:
    """Save at steps 1 and 2; die at a place of the second save. Return how many there are."""
    places = []

    def count(place: object) -> None:
        places.append(place)
        if len(places) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    run = Run(2)
    run.train(0, 1)
    run.save(Path(folder), keep_last=1)
    run.train(1, 2)
    faults.arm(rank=0, step=2, point="checkpoint", action=count)
    run.save(Path(folder), keep_last=1)
    return len(places)


@pytest.mark.parametrize("every", in_tiers([20, 1], lambda every: every > 1))
def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, every: int
) -> None:
    expected = {}
    run = Run(2)
    for step in (1, 2):
        run.train(step - 1, step)
        expected[step] = run.tensors()
    n_places = run_workers(save_twice, 1, str(tmp_path / "undisturbed"), 0, process_group=False)[0]
    assert n_places >= 30
    found = []
    for kill_at in range(n_places, 0, -every):
        root = tmp_path / str(kill_at)
        (outcome,) = run_workers(
            save_twice, 1, str(root), kill_at, process_group=False, may_die=True
        )
        assert isinstance(outcome, WorkerDiedError)  # so the fault has fired
        resumed = Run(2)
        step = resumed.load(root).step
        assert resumed.equals(expected[step])
        found.append(step)
        resumed.train(step, step + 1)
        resumed.save(root, keep_last=1)
        # Step 2 may be complete already, without being the latest.
        left = sorted(os.listdir(root))
        assert left[0] == "latest" and len(left) == 2
        assert left[1].removesuffix(".1") == f"step-{step + 1:012d}"
    # Once it has its name on the disk, it stays.
    assert found == sorted(found, reverse=True) and set(found) == {1, 2}


@pytest.mark.root
def test_a_full_disk_is_a_typed_error_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    run = Run(2)
    run.train(0, 1)
    expected = run.tensors()
    run.save(small_disk, keep_last=1)
    run.train(1, 2)
    for _ in range(2):
        with pytest.raises(errors.CheckpointError, match="No space left on device"):
            run.save(small_disk, extra=torch.zeros(2_000_000))
    resumed = Run(2)
    assert resumed.load(small_disk).step == 1
    assert resumed.equals(expected)
    assert sorted(os.listdir(small_disk)) == ["latest", "step-000000000001"]
    run.save(small_disk, keep_last=1)  # training goes on, and a save that fits succeeds
    assert sorted(os.listdir(small_disk)) == ["latest", "step-000000000002"]


@pytest.mark.root
def test_a_folder_that_is_read_only_is_a_typed_error_and_still_loads(small_disk: Path) -> None:
    run = Run(2)
    run.train(0, 1)
    expected = run.tensors()
    run.save(small_disk, keep_last=1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run.train(1, 2)
    with pytest.raises(errors.CheckpointError, match=f"{small_disk}.*Read-only file system"):
        run.save(small_disk, keep_last=1)
    resumed = Run(2)
    assert resumed.load(small_disk).step == 1
    assert resumed.equals(expected)
    run.train(2, 3)


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.CheckpointError, match="file"):
        Run(2).save(tmp_path / "file" / "runs")


def test_what_a_killed_save_left_is_gone_before_the_next_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would have no room on a small disk."""
    left = [tmp_path / f"partial-step-000000000001-{nonce}" for nonce in ("a", "b")]
    for folder in left:
        folder.mkdir()
        (folder / "model-00000.safetensors").write_bytes(b"half")
    (tmp_path / f"{left[0].name}.latest").write_text("")
    found = []

    def look(path: Path, *_: object) -> None:
        found.append(sorted(os.listdir(tmp_path)))
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(writer, "write_tensors", look)
    with pytest.raises(errors.CheckpointError, match="No space left on device"):
        Run(2).save(tmp_path)
    assert [len(names) for names in found] == [1]
    assert not list(tmp_path.iterdir())
