"""What a checkpoint must not lose, mix up, or half apply."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distlion
from checkpoint.runs import STEPS, Run
from distlion import errors, faults


def test_values_whose_places_are_called_alike_stay_apart(tmp_path: Path) -> None:
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    Run().save(tmp_path, {"a.b": ones, "a": {"b": twos}, 1: ones, "1": twos})
    found = Run().load(tmp_path).extra
    assert torch.equal(found["a.b"], ones) and torch.equal(found["a"]["b"], twos)
    assert torch.equal(found[1], ones) and torch.equal(found["1"], twos)


def test_a_parameter_outside_of_the_model_comes_back(tmp_path: Path) -> None:
    model, temperature = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.tensor(7.0))
    cluster = distlion.VirtualCluster([*model.parameters(), temperature], workers=2)
    distlion.save_checkpoint(tmp_path, model, cluster)
    with torch.no_grad():
        temperature.fill_(-1.0)
    distlion.load_checkpoint(tmp_path, model, cluster)
    assert float(temperature.detach()) == 7.0


def test_another_dtype_of_parameters_or_momenta_is_refused(tmp_path: Path) -> None:
    Run().save(tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"momentum in torch.float32.*torch.bfloat16"):
        Run(precision=distlion.Precision(exp_avg=torch.bfloat16)).load(tmp_path)
    half = Run()
    half.model.bfloat16()
    with pytest.raises(errors.CheckpointError, match=r"torch.float32.*torch.bfloat16"):
        half.load(tmp_path)


def test_large_and_odd_values_that_were_saved_load_again(tmp_path: Path) -> None:
    extra = {"many": [0.5] * 300_000, "\ud800": 1, "large": 10**4000}
    Run().save(tmp_path, extra)
    assert Run().load(tmp_path).extra == extra


@pytest.mark.parametrize("kind", ["cycle", "number"])
def test_what_cannot_be_written_is_a_typed_error(tmp_path: Path, kind: str) -> None:
    extra: Any = [10**5000]
    if kind == "cycle":
        extra.append(extra)
    run = Run()
    with pytest.raises(errors.CheckpointError):
        run.save(tmp_path, extra)
    run.train(0, 1)
    run.save(tmp_path)


def test_a_tensor_that_cannot_be_written_is_named_by_its_place(tmp_path: Path) -> None:
    run = Run()
    for value in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")):
        with pytest.raises(errors.CheckpointError, match=r"extra\.turns\.1 is a tensor of"):
            run.save(tmp_path, {"turns": [0, value]})


@pytest.mark.filterwarnings("error")
def test_an_array_that_may_only_be_read_is_saved_without_a_warning(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    torch.set_warn_always(True)  # else torch warns once in a process
    try:
        Run().save(tmp_path, array)
    finally:
        torch.set_warn_always(False)
    assert np.array_equal(Run().load(tmp_path).extra, array)


def test_a_save_in_the_background_stays_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run()
    moved = faults.arm(rank=0, step=0, point="checkpoint", action=lambda place: os.chdir(other))
    try:
        found = run.save("run", async_=True)
    finally:
        faults.disarm_all()
    assert moved.fired
    assert found.parent == tmp_path / "run" and not list(other.iterdir())
    assert distlion.checkpoint.verify_checkpoint(tmp_path / "run").problems == ()


def test_an_impossible_name_of_a_folder_is_refused_and_the_optimizer_lives(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(errors.CheckpointError, match="null byte"):
        run.save("no\0name")
    run.train(0, 1)
    run.save(tmp_path)


def test_the_folder_of_one_checkpoint_is_no_folder_for_checkpoints(tmp_path: Path) -> None:
    run = Run()
    one = run.save(tmp_path)
    run.train(0, 1)
    for call in (distlion.save_checkpoint, distlion.check_checkpoint_folder):
        with pytest.raises(errors.CheckpointError, match=f"Save into {tmp_path}"):
            call(one, run.model, run.optimizer)
    assert run.save(tmp_path).parent == tmp_path


def test_other_things_than_a_model_and_a_scheduler_are_named(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path)
    for call in (distlion.save_checkpoint, distlion.load_checkpoint):
        with pytest.raises(errors.CheckpointError, match="model is a OrderedDict"):
            call(tmp_path, run.model.state_dict(), run.optimizer)  # type: ignore[operator]
        with pytest.raises(errors.CheckpointError, match="scheduler is a list"):
            call(tmp_path, run.model, run.optimizer, [run.scheduler])  # type: ignore[operator]


def test_a_schedule_of_another_kind_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    first = Run()
    first.train(0, 2)
    first.save(tmp_path)
    other = Run()
    parts = [
        torch.optim.lr_scheduler.ConstantLR(other.optimizer, factor=0.5),
        torch.optim.lr_scheduler.LinearLR(other.optimizer),
    ]
    other.scheduler = torch.optim.lr_scheduler.SequentialLR(other.optimizer, parts, milestones=[2])
    before, epoch = other.tensors(), other.scheduler.last_epoch
    lr = other.optimizer.param_groups[0]["lr"]
    with pytest.raises(errors.CheckpointError, match="_schedulers"):
        other.load(tmp_path)
    assert other.equals(before)
    assert other.optimizer.committed_step == 0
    assert other.scheduler.last_epoch == epoch
    assert other.optimizer.param_groups[0]["lr"] == lr


def test_a_load_waits_for_the_save_in_the_background(tmp_path: Path) -> None:
    run = Run()
    run.train(0, 2)
    distlion.save_checkpoint(tmp_path, run.model, run.optimizer, run.scheduler, async_=True)
    assert run.load(tmp_path).step == 2


def test_a_save_in_the_background_that_fails_is_logged_and_does_not_stop_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Run()
    with caplog.at_level(logging.ERROR, logger="distlion"):
        pending = distlion.save_checkpoint(
            tmp_path / "file" / "runs", run.model, run.optimizer, async_=True
        )
        run.save(tmp_path / "good")
    assert "a checkpoint could not be written" in caplog.text
    with pytest.raises(errors.CheckpointError, match="file"):
        pending.wait()
    loaded = Run().load(tmp_path / "good")
    assert loaded.step == loaded.local_step == 0


def test_the_folder_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    Run().save(tmp_path, keep_last=1)
    model = torch.nn.Linear(3, 2)
    cluster = distlion.VirtualCluster(model.parameters(), workers=4)
    with pytest.raises(errors.CheckpointError, match="a folder of its own"):
        distlion.save_checkpoint(tmp_path, model, cluster, keep_last=1)
    assert Run().load(tmp_path).step == 0


def test_the_newest_are_kept_where_a_run_went_back(tmp_path: Path) -> None:
    run = Run()
    for stop in (1, 2, 3):
        run.train(stop - 1, stop)
        run.save(tmp_path)
    run.load(tmp_path / "step-000000000001")
    run.train(1, 2)
    run.save(tmp_path, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000000000002.1", "step-000000000003"]
    run.train(2, STEPS)
    run.save(tmp_path, keep_last=2)
    names = sorted(os.listdir(tmp_path))
    assert names == ["latest", "step-000000000002.1", f"step-{STEPS:012d}"]


def test_what_cannot_be_pruned_is_left_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    run.save(tmp_path)
    run.train(0, 1)

    def be_in_the_way(place: object) -> None:
        if place == "replaced latest":
            (tmp_path / "partial-step-000000000000").write_text("in the way")

    in_the_way = faults.arm(rank=0, step=1, point="checkpoint", action=be_in_the_way)
    try:
        with caplog.at_level(logging.WARNING, logger="distlion"):
            path = run.save(tmp_path, keep_last=1)
    finally:
        faults.disarm_all()
    assert in_the_way.fired
    assert "could not be removed" in caplog.text
    assert Run().load(path).step == 1
