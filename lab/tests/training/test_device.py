"""Where a run computes."""

from __future__ import annotations

import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.tasks.base import Batch
from distlion_lab.training.device import check_device, find_device, move_batch
from distlion_lab.training.train_settings import TrainSettings


def test_a_device_that_is_not_there_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(InvalidArgumentError, match=r"built without CUDA; .* install a build"):
        check_device("cuda")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    with pytest.raises(InvalidArgumentError, match=r"CUDA 12\.8, .*nvidia-smi"):
        TrainSettings.with_defaults(device="cuda")
    with pytest.raises(InvalidArgumentError, match="expected one that torch knows"):
        check_device("quantum")


def test_a_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(InvalidArgumentError, match="torch finds 2 here"):
        check_device("cuda:2")


def test_baselines_of_processes_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert TrainSettings.with_defaults(device="cuda").device == "cuda"
    with pytest.raises(InvalidArgumentError, match=r"global-adamw, .* 'distlion compare --device'"):
        TrainSettings.with_defaults(rule="global-adamw", device="cuda")


def test_workers_of_a_machine_take_turns_on_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [find_device("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert find_device("cuda:1", 0) == torch.device("cuda", 1)
    assert find_device("cpu", 3) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_device("cuda", 6).index == 1


def test_a_batch_goes_where_the_model_is() -> None:
    batch = Batch({"x": torch.zeros(2, 3)}, torch.zeros(2, dtype=torch.int64))
    there = move_batch(batch, torch.device("meta"))
    assert there.inputs["x"].is_meta
    assert there.targets.is_meta
    assert move_batch(batch, torch.device("cpu")) is batch
