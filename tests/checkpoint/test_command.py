from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass

import pytest

from checkpoint.runs import Run
from distlion.__main__ import main


@dataclass
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Run ``distlion checkpoint`` with arguments; return how it ended."""

    def invoke(*arguments):
        monkeypatch.setattr(sys, "argv", ["distlion", "checkpoint", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = ended.code
        return Ended(status, *capsys.readouterr())

    return invoke


@pytest.fixture
def saved(tmp_path):
    """Save two checkpoints of three workers; return the newest's folder."""
    run = Run(workers=3, seed=5)
    run.train(0, 1)
    run.save(tmp_path / "run")
    run.train(1, 2)
    return run.save(tmp_path / "run")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_whole_checkpoint_has_status_0_and_a_row_for_each_file(saved, invoke):
    result = invoke("verify", saved.parent)
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    for file in saved.glob("*.safetensors"):
        assert [file.name, f"{file.stat().st_size:,}", "whole"] in rows


def test_damaged_file_is_named_in_one_line_with_status_1(saved, invoke):
    flip_a_bit(saved / "worker-00001.safetensors")
    result = invoke("verify", saved)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "worker-00001.safetensors" in line
    states = [line.split()[-1] for line in result.stdout.splitlines() if ".safetensors" in line]
    assert sorted(states) == ["damaged", *["whole"] * (len(states) - 1)]


def test_several_damaged_files_are_one_line_still(saved, invoke):
    flip_a_bit(saved / "worker-00001.safetensors")
    (saved / "worker-00002.safetensors").unlink()
    result = invoke("verify", saved)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.endswith("1 more of its files are not whole")


@pytest.mark.parametrize("command", ["verify", "show"])
def test_damaged_manifest_is_one_line_with_status_1(saved, command, invoke):
    flip_a_bit(saved / "manifest.json")
    result = invoke(command, saved)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["verify", "show"])
@pytest.mark.parametrize("name", ["nope", "step-000000000007"])
def test_folder_that_is_not_there_is_said_not_to_exist(command, name, tmp_path, invoke):
    result = invoke(command, tmp_path / name)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 1
    assert f"the folder {tmp_path / name} does not exist" in line
    assert "host" not in line.replace(str(tmp_path), "")


@pytest.mark.parametrize("command", ["verify", "show"])
def test_folder_that_cannot_be_looked_up_is_one_line_with_the_reason(command, tmp_path, invoke):
    # The system refuses so long a name, as it does a folder that may not be entered.
    result = invoke(command, tmp_path / ("n" * 300))
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 1
    assert line.endswith("cannot be read: File name too long")


@pytest.mark.parametrize("command", ["verify", "show"])
def test_folder_without_checkpoints_is_one_line_with_status_1(tmp_path, command, invoke):
    result = invoke(command, tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_checkpoint_under_another_name_is_told_so(saved, invoke, tmp_path):
    best = shutil.copytree(saved, tmp_path / "best")
    result = invoke("verify", best)
    assert result.exit_code == 1
    assert f"{best} has the files of one checkpoint" in result.stderr
    assert invoke("verify", best.rename(tmp_path / "step-000000000900")).exit_code == 0


def test_show_reads_no_file(saved, invoke):
    flip_a_bit(saved / "worker-00001.safetensors")
    result = invoke("show", saved)
    assert result.exit_code == 0, result.stderr
    assert "step 2, 3 workers, seed 5" in result.stdout
    assert "listed" in result.stdout
    assert "whole" not in result.stdout


def test_show_names_a_missing_file(saved, invoke):
    (saved / "worker-00002.safetensors").unlink()
    result = invoke("show", saved)
    assert result.exit_code == 1
    assert "lacks worker-00002.safetensors" in result.stderr


def test_json_of_verify_has_every_file_with_size_sum_and_state(saved, invoke):
    flip_a_bit(saved / "worker-00001.safetensors")
    result = invoke("verify", saved, "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert (record["step"], record["workers"], record["seed"]) == (2, 3, 5)
    assert record["files"].keys() == {path.name for path in saved.glob("*.safetensors")}
    damaged = [name for name, file in record["files"].items() if file["state"] != "whole"]
    assert damaged == ["worker-00001.safetensors"]


def test_json_of_show_is_that_of_verify_but_for_the_states(saved, invoke):
    shown, verified = (
        json.loads(invoke(command, saved, "--json").stdout) for command in ("show", "verify")
    )
    assert {file.pop("state") for file in shown["files"].values()} == {"listed"}
    assert {file.pop("state") for file in verified["files"].values()} == {"whole"}
    assert shown == verified


def test_the_folder_has_a_line_of_its_own(saved, invoke):
    result = invoke("show", saved)
    assert str(saved) in result.stdout.splitlines()
