"""Checkpoints made to harm whoever loads them."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.forging import PROCESS, Tensors, forge, forge_tensors, forge_tree
from checkpoint.runs import Run
from distlion import errors
from distlion.checkpoint import read_extra
from distlion.checkpoint.folder import read_manifest
from distlion.checkpoint.reader import check_schedule
from distlion.checkpoint.tensor_file import FileRecord, check_file
from distlion.checkpoint.tensor_file import write_tensors as write
from distlion.checkpoint.tree import decode_tree

STEP = "step-000000000000"


class Evil:
    """Run a command when unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Run().save(tmp_path)
    return tmp_path / STEP


def refuse(folder: Path, match: str) -> None:
    run = Run()
    before = run.tensors()
    with pytest.raises(errors.CheckpointError, match=match):
        run.load(folder)
    assert run.equals(before)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("name", ["process-00000", "worker-00000", "model-00000"])
def test_a_pickle_is_no_tensor_file_and_is_not_run(folder: Path, name: str) -> None:
    forge(folder, f"{name}.safetensors", pickle.dumps(Evil()))
    refuse(folder, f"{name}.safetensors is not a safetensors file")


def test_a_zip_that_torch_would_load_is_refused(folder: Path) -> None:
    torch.save({"a": torch.zeros(3)}, "state.pt")
    forge(folder, "worker-00001.safetensors", Path("state.pt").read_bytes())
    refuse(folder, "worker-00001.safetensors is not a safetensors file")


def test_a_zip_bomb_is_refused(folder: Path) -> None:
    with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("data.pkl", bytes(1 << 26))
    forge(folder, "worker-00001.safetensors", Path("bomb.zip").read_bytes())
    refuse(folder, "worker-00001.safetensors is not a safetensors file")


@pytest.mark.parametrize("length", [1 << 62, 1 << 40, 200_000_000, 0])
def test_a_header_of_a_forged_length_is_refused(folder: Path, length: int) -> None:
    forge(folder, "worker-00002.safetensors", length.to_bytes(8, "little") + b"{}" * 64)
    refuse(folder, "worker-00002.safetensors is not a safetensors file")


@pytest.mark.parametrize(
    "name",
    ["../../x", "../worker-00000.safetensors", "/etc/passwd", "worker-00000.pt", "", "latest"],
)
def test_a_manifest_that_names_other_files_is_refused(folder: Path, name: str) -> None:
    files = {**read_manifest(folder).files, name: FileRecord(1, "0" * 64)}
    manifest = replace(read_manifest(folder), files=files)
    (folder / "manifest.json").write_bytes(manifest.encode())
    refuse(folder, "manifest.json was damaged, or is not a manifest .a file named")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers", 0),
        ("workers", 10**8),
        ("workers", 10**30),
        ("workers", "4"),
        ("node_size", 3),
        ("step", -1),
        ("leaders", [7]),
        ("format", 3),
        ("identity", ""),
        ("identity", "../../x"),
        ("identity", 7),
        ("format", 1),
    ],
)
def test_a_manifest_with_forged_numbers_is_refused(folder: Path, key: str, value: Any) -> None:
    manifest = replace(read_manifest(folder), **{key: value})
    (folder / "manifest.json").write_bytes(manifest.encode())
    refuse(folder, "manifest.json")


def test_a_manifest_of_deep_brackets_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"[" * 1_000_000)
    refuse(folder, "manifest.json was damaged")


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "worker-00003.safetensors"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    refuse(folder, "worker-00003.safetensors cannot be read")


def test_a_link_in_place_of_a_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    refuse(tmp_path, "is missing")
    refuse(folder, "not the folder of a checkpoint")


def test_a_pipe_in_place_of_a_file_is_refused(folder: Path) -> None:
    path = folder / "worker-00003.safetensors"
    record = read_manifest(folder).files[path.name]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(errors.CheckpointError, match=path.name):
        check_file(path, record)


def test_a_tree_of_unknown_kinds_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "process-00000.safetensors"
    for extra in ({"$": "object"}, {"$": "array", "name": "x"}, {"$": "dict", "items": [1]}, {}):
        tree = {"layout": [], "others": extra}
        forged = tmp_path / "forged"
        forged.unlink(missing_ok=True)
        content = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        write(forged, {"tree": content}, lambda place: None)
        forge(folder, name, forged.read_bytes())
        refuse(folder, "lists other parameters|malformed")


def test_an_array_of_what_is_no_number_is_refused() -> None:
    for dtype in ("O", "V8", "S8", "u1,O", "M8[s]", {"names": ["x"], "formats": ["O"]}, ["O"], 8):
        array = {"$": "array", "name": "x", "dtype": dtype, "shape": [1]}
        with pytest.raises(errors.CheckpointError, match="is an array of"):
            decode_tree(array, lambda name: torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [[1 << 70], [-5], "x", None, [[1]], [1.5]])
def test_an_array_of_an_impossible_shape_is_refused(shape: Any) -> None:
    array = {"$": "array", "name": "x", "dtype": "<i8", "shape": shape}
    with pytest.raises(errors.CheckpointError, match=r"malformed|has shape"):
        decode_tree(array, lambda name: torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"optimizer": 3}, "optimizer"),
        ({"step": None}, "step"),
        ([1], "a list"),
        (None, "no scheduler"),
        ({"last_epoch": "x"}, "last_epoch"),
        ({"base_lrs": 1.0}, "base_lrs"),
        ({"base_lrs": [None]}, "base_lrs"),
    ],
)
def test_a_state_that_is_none_of_the_scheduler_is_refused(state: Any, said: str) -> None:
    run = Run()
    with pytest.raises(errors.CheckpointError, match=said):
        check_schedule(Path("x"), state, run.scheduler)
    check_schedule(Path("x"), run.scheduler.state_dict(), run.scheduler)


def test_momenta_of_another_shape_or_that_are_missing_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "forged"
    write(forged, {"exp_avg.0": torch.zeros(2)}, lambda place: None)
    forge(folder, "worker-00001.safetensors", forged.read_bytes())
    refuse(folder, "momentum 0 has 2 elements")


def test_values_that_are_not_finite_load_as_they_are_and_are_met_by_the_policy(
    tmp_path: Path,
) -> None:
    run = Run()
    run.optimizer.exp_avg(1)[0].fill_(float("nan"))
    run.save(tmp_path)
    resumed = Run()
    resumed.load(tmp_path)
    with pytest.raises(errors.NonFiniteError, match="worker 1"):
        resumed.train(0, 1)


class Warmth:
    """A schedule that keeps a state."""

    def __init__(self) -> None:
        self.warmth = 1.0

    def __call__(self, step: int) -> float:
        return self.warmth


def test_a_scheduler_of_an_object_and_a_function_loads_its_own_state() -> None:
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [Warmth(), lambda step: 1.0])
    check_schedule(Path("folder"), scheduler.state_dict(), scheduler)
    other = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, Warmth()])
    with pytest.raises(errors.CheckpointError, match="lr_lambdas"):
        check_schedule(Path("folder"), scheduler.state_dict(), other)


def test_a_schedule_of_a_tensor_rate_and_one_of_a_float_take_each_other() -> None:
    states = []
    for lr in (0.1, torch.tensor(0.1)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.step()
        scheduler.step()
        states.append((scheduler.state_dict(), scheduler))
    assert isinstance(states[1][0]["_last_lr"][0], torch.Tensor)
    check_schedule(Path("folder"), states[1][0], states[0][1])
    check_schedule(Path("folder"), states[0][0], states[1][1])
    with pytest.raises(errors.CheckpointError, match="_last_lr"):
        check_schedule(Path("folder"), {**states[1][0], "_last_lr": [torch.ones(2)]}, states[0][1])


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let this process grow by 1 GB at most, so that a claim that is believed fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("division", [[10**9], [1, 10**12], [10**100], [0, 10**9, 1]])
def test_a_division_that_claims_more_parameters_than_there_are_is_refused(
    folder: Path, division: list[int]
) -> None:
    forge_tree(folder, lambda tree: tree.update(division=division))
    refuse(folder, rf"was saved from 1 groups of {re.escape(str(division))} parameters")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("key", ["extra", "others"])
def test_a_tensor_that_is_named_a_thousand_times_is_refused(folder: Path, key: str) -> None:
    """Its file has 1 MB, and the copies would have 4 GB."""

    def name_often(tensors: Tensors) -> None:
        tree = json.loads(bytes(tensors["tree"].numpy()))
        tree[key] = [{"$": "tensor", "name": "large"}] * 4000
        tensors["tree"] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        tensors["large"] = torch.ones(1 << 18)

    forge_tensors(folder, PROCESS, name_often)
    refuse(folder, "names 'large' twice; expected it once")


def test_extra_is_read_without_a_model_and_its_file_is_checked(folder: Path) -> None:
    state = {"config": {"width": 8}, "rng": torch.arange(3)}
    Run().save(folder.parent, extra=state, overwrite=True)
    found = read_extra(folder.parent)
    assert found["config"] == state["config"] and torch.equal(found["rng"], state["rng"])
    assert read_extra(folder) is None
    assert read_extra(folder, process=np.int64(0)) is None  # type: ignore[arg-type]
    with pytest.raises(errors.CheckpointError, match=r"processes 0 to 0; got process=1"):
        read_extra(folder, process=1)
    with pytest.raises(errors.UnsupportedTypeError, match=r"process=1\.0: expected an integer"):
        read_extra(folder, process=1.0)  # type: ignore[arg-type]
    forge_tree(folder, lambda tree: tree.pop("extra"))
    with pytest.raises(errors.CheckpointError, match="malformed"):
        read_extra(folder)
    (folder / PROCESS).write_bytes(b"damaged")
    with pytest.raises(errors.CheckpointError, match="7 bytes"):
        read_extra(folder)
