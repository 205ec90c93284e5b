"""Files that were damaged, cut off, lost or swapped: all are found, and nothing is loaded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.runs import Run
from distlion import errors
from distlion.checkpoint import verify_checkpoint

CUTS = 100


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two checkpoints, of which the latest is to be damaged."""
    root = tmp_path_factory.mktemp("damage")
    run = Run()
    for stop in (1, 2):
        run.train(stop - 1, stop)
        run.save(root)
    return root


def refusal(root: Path, run: Run | None = None) -> str:
    """Load; return the error's text, and check that nothing has changed."""
    run = run or Run()
    before = run.tensors()
    with pytest.raises(errors.CheckpointError) as caught:
        run.load(root)
    assert run.equals(before)
    assert run.optimizer.committed_step == 0
    return str(caught.value)


def files_of(root: Path) -> list[Path]:
    return [*sorted((root / "step-000000000002").iterdir()), root / "latest"]


def list_problems(root: Path) -> list[str]:
    """Look for damage without loading."""
    try:
        return list(verify_checkpoint(root).problems)
    except errors.CheckpointError as error:
        return [str(error)]


def with_damage(path: Path, spoil: Callable[[bytearray], None], look: Callable[[], None]) -> None:
    """Damage a file, look, and restore it."""
    data = path.read_bytes()
    damaged = bytearray(data)
    spoil(damaged)
    path.write_bytes(damaged)
    look()
    path.write_bytes(data)


@pytest.mark.parametrize("flips", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found_and_its_file_named(checkpoint: Path, flips: int) -> None:
    rng = random.Random(flips)
    files, run = files_of(checkpoint), Run()
    for number in range(flips):
        path = files[number % len(files)]

        def flip(data: bytearray) -> None:
            bit = rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8

        with_damage(path, flip, lambda path=path: assert_named(path, checkpoint, run))
    assert Run().load(checkpoint).step == 2


def test_damage_is_found_without_a_load(checkpoint: Path) -> None:
    for path in files_of(checkpoint):

        def flip(data: bytearray) -> None:
            data[len(data) // 2] ^= 4

        def look(path: Path = path) -> None:
            (problem,) = list_problems(checkpoint)
            assert str(path) in problem

        with_damage(path, flip, look)
    assert not verify_checkpoint(checkpoint).problems


def assert_named(path: Path, root: Path, run: Run | None = None) -> None:
    assert str(path) in refusal(root, run)


def test_every_file_that_was_cut_off_is_found(checkpoint: Path) -> None:
    rng = random.Random(1)
    files, run = files_of(checkpoint), Run()
    for number in range(CUTS):
        path = files[number % len(files)]

        def cut(data: bytearray) -> None:
            del data[rng.randrange(len(data)) :]

        with_damage(path, cut, lambda path=path: assert_named(path, checkpoint, run))


def test_every_missing_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    for path in files_of(checkpoint):
        path.rename(tmp_path / "away")
        assert str(path) in refusal(checkpoint)
        (tmp_path / "away").rename(path)


def test_two_workers_files_that_were_swapped_are_found(checkpoint: Path, tmp_path: Path) -> None:
    folder = checkpoint / "step-000000000002"
    first, second = folder / "worker-00000.safetensors", folder / "worker-00001.safetensors"
    copies = shutil.copy(first, tmp_path / "0"), shutil.copy(second, tmp_path / "1")
    shutil.copy(copies[0], second)
    shutil.copy(copies[1], first)
    assert str(first) in refusal(checkpoint)
    shutil.copy(copies[0], first)
    shutil.copy(copies[1], second)


def test_an_earlier_checkpoint_loads_by_its_name_where_the_latest_is_damaged(
    checkpoint: Path,
) -> None:
    def spoil(data: bytearray) -> None:
        data.clear()

    def look() -> None:
        refusal(checkpoint)
        assert Run().load(checkpoint / "step-000000000001").step == 1

    with_damage(checkpoint / "step-000000000002" / "manifest.json", spoil, look)
