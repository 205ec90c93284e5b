"""A folder of checkpoints belongs to one optimizer, and to those that go on from there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from checkpoint.forging import forge_manifest
from checkpoint.runs import Run
from distlion.checkpoint import inspect_checkpoint
from distlion.errors import CheckpointError

FIRST = "step-000000000001"


def save_one(root: Path, **settings: Any) -> Run:
    """Save a run after its first step."""
    run = Run(**settings)
    run.train(0, 1)
    run.save(root)
    return run


def list_files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def refuse(root: Path, run: Run, **options: Any) -> None:
    """Ask and save, and check that both are refused alike and that the folder is as it was."""
    before = list_files(root)
    with pytest.raises(CheckpointError) as asked:
        check(root, run)
    assert list_files(root) == before
    with pytest.raises(
        CheckpointError, match=r"another optimizer.*load_checkpoint.*overwrite=True"
    ) as refused:
        run.save(root, **options)
    assert list_files(root) == before
    assert text_of(asked) == text_of(refused)


def check(root: Path, run: Run) -> None:
    distlion.check_checkpoint_folder(root, run.model, run.optimizer)


def text_of(raised: pytest.ExceptionInfo[CheckpointError]) -> str:
    """Return a message without the name of the call that raised it."""
    return str(raised.value).partition("()")[2]


@pytest.mark.parametrize("options", [{}, {"async_": True}, {"keep_last": 1}])
def test_a_folder_of_another_optimizer_of_the_same_parameters_is_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    first, second = save_one(tmp_path), Run()
    second.train(0, 2)
    refuse(tmp_path, second, **options)
    first.train(1, 2)
    first.save(tmp_path)
    second.save(tmp_path / "own")
    second.train(2, 3)
    second.save(tmp_path / "own")
    refuse(tmp_path, second)


def test_whoever_goes_on_from_a_folder_may_save_there(tmp_path: Path) -> None:
    save_one(tmp_path / "first")
    save_one(tmp_path / "third")
    second = Run()
    second.load(tmp_path / "first")
    second.save(tmp_path / "first")
    refuse(tmp_path / "third", second)
    second.load(tmp_path / "third" / FIRST)
    second.save(tmp_path / "third")


def test_of_two_that_load_one_checkpoint_only_one_goes_on_in_a_folder(tmp_path: Path) -> None:
    save_one(tmp_path / "start")
    one, other = Run(), Run()
    for run in (one, other):
        run.load(tmp_path / "start")
        run.train(1, 2)
    one.save(tmp_path / "both")
    refuse(tmp_path / "both", other)
    one.save(tmp_path / "start")
    refuse(tmp_path / "start", other)


def test_a_folder_of_the_best_is_used_again_after_several_resumes(tmp_path: Path) -> None:
    latest, best = tmp_path / "latest", tmp_path / "best"
    first = save_one(latest)
    first.save(best)
    for step in range(1, 4):  # resumes that find nothing better
        run = Run()
        run.load(latest)
        run.train(step, step + 1)
        run.save(latest)
    run.save(best)
    again = Run()
    again.load(latest)
    again.save(best)
    stranger = Run()
    stranger.train(0, 6)
    refuse(best, stranger)


def test_of_two_descendants_only_one_goes_on_in_a_folder(tmp_path: Path) -> None:
    save_one(tmp_path / "start")
    runs = [Run(), Run()]
    for number, run in enumerate(runs):
        run.load(tmp_path / "start")
        run.train(1, 2)
        run.save(tmp_path / str(number))
    children = [Run(), Run()]
    for number, child in enumerate(children):
        child.load(tmp_path / str(number))
    children[0].save(tmp_path / "start")
    refuse(tmp_path / "start", children[1])


@pytest.mark.parametrize("continues", ["0" * 32, ["0"], [1], {"0" * 32: 1}])
def test_forged_ancestors_are_damage(tmp_path: Path, continues: object) -> None:
    save_one(tmp_path)
    forge_manifest(tmp_path / FIRST, continues=continues)
    with pytest.raises(CheckpointError, match=r"manifest\.json was damaged.*continues"):
        Run().load(tmp_path)


def test_a_run_goes_on_from_an_earlier_checkpoint_that_others_followed(tmp_path: Path) -> None:
    save_one(tmp_path)
    later = Run()
    later.load(tmp_path)
    later.train(1, 2)
    later.save(tmp_path)
    again = Run()
    again.load(tmp_path / FIRST)
    again.train(1, 3)
    again.save(tmp_path)
    assert inspect_checkpoint(tmp_path)[1].step == 3


@pytest.mark.parametrize("damaged", ["latest", "manifest"])
def test_a_damaged_checkpoint_leaves_the_folder_to_its_optimizer(
    tmp_path: Path, damaged: str
) -> None:
    first = save_one(tmp_path)
    first.train(1, 2)
    first.save(tmp_path)
    path = tmp_path / "step-000000000002" / "manifest.json" if damaged == "manifest" else None
    (path or tmp_path / "latest").write_bytes(b"damaged")
    other = Run()
    other.train(0, 3)
    refuse(tmp_path, other, keep_last=1)
    first.train(2, 3)
    first.save(tmp_path)


def test_a_folder_whose_owner_cannot_be_told_is_refused(tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / FIRST / "manifest.json").write_bytes(b"damaged")
    other = Run()
    other.train(0, 2)
    before = list_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"owner is unknown.*overwrite=True"):
        other.save(tmp_path)
    assert list_files(tmp_path) == before
    other.save(tmp_path, overwrite=True)


def test_another_number_of_workers_goes_on_in_the_folder(tmp_path: Path) -> None:
    save_one(tmp_path)
    fewer = Run(3)
    fewer.load(tmp_path, on_world_change="map")
    fewer.train(1, 2)
    fewer.save(tmp_path)
    assert inspect_checkpoint(tmp_path)[1].step == 2


def test_a_load_that_is_refused_leaves_the_folder_to_its_optimizer(tmp_path: Path) -> None:
    save_one(tmp_path)
    other = Run(3)
    with pytest.raises(CheckpointError, match="4 workers"):
        other.load(tmp_path)
    refuse(tmp_path, other)


def test_a_folder_is_taken_over_where_that_is_asked_for(tmp_path: Path) -> None:
    first, second = save_one(tmp_path), Run()
    second.train(0, 2)
    expected = second.tensors()
    second.save(tmp_path, overwrite=True, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000000000002"]
    resumed = Run()
    resumed.load(tmp_path)
    assert resumed.equals(expected)
    refuse(tmp_path, first)


def test_more_parameters_of_the_same_optimizer_go_into_its_folder(tmp_path: Path) -> None:
    run = save_one(tmp_path)
    run.model.more = torch.nn.Parameter(torch.ones(5))
    run.optimizer.add_param_group({"params": [("more", run.model.more)], "initial_lr": 1e-2})
    run.scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
    run.train(1, 2)
    run.save(tmp_path)
    assert inspect_checkpoint(tmp_path)[1].step == 2


def test_a_checkpoint_of_format_1_belongs_to_whoever_has_its_parameters(tmp_path: Path) -> None:
    save_one(tmp_path)
    forge_manifest(tmp_path / FIRST, format=1, identity="")
    other = Run()
    other.load(tmp_path)
    assert other.optimizer.committed_step == 1
    third = Run()
    third.train(0, 2)
    third.save(tmp_path)
    refuse(tmp_path, other)
    forge_manifest(tmp_path / "step-000000000002", format=1, identity="", layout="0" * 64)
    refuse(tmp_path, third)


def test_a_folder_that_may_be_used_is_not_touched_when_it_is_asked_for(tmp_path: Path) -> None:
    run = Run()
    check(tmp_path / "deep" / "missing", run)
    assert not list(tmp_path.iterdir())
    check(tmp_path, run)
    run.save(tmp_path)
    before = list_files(tmp_path)
    check(tmp_path, run)
    resumed = Run()
    resumed.load(tmp_path)
    check(tmp_path, resumed)
    assert list_files(tmp_path) == before


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_file_in_place_of_the_folder_is_found_when_it_is_asked_for(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file is no folder, or is not writable"):
        check(tmp_path / "file" / below, Run())


def test_a_folder_whose_owner_is_unknown_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / FIRST / "manifest.json").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="owner is unknown"):
        check(tmp_path, Run())


def test_the_state_of_a_model_in_its_place_is_refused_ahead_too(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(CheckpointError, match=r"expected the torch\.nn\.Module itself"):
        distlion.check_checkpoint_folder(tmp_path, run.model.state_dict(), run.optimizer)  # type: ignore[arg-type]
