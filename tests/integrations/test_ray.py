"""Ray Train with workers that vote, by its example."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ray_torch = pytest.importorskip("ray.train.torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "07_ray.py"


def test_three_lines_of_the_example_change() -> None:
    marked = [line for line in EXAMPLE.read_text().splitlines() if re.search(r"  # \d$", line)]
    assert [line[-1] for line in marked] == ["1", "2", "3"]


def test_ray_has_what_the_example_asks_for() -> None:
    spec = importlib.util.spec_from_file_location("ray_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert "parallel_strategy" in inspect.signature(ray_torch.prepare_model).parameters
    ray_torch.TorchTrainer(example.train, train_loop_config={"before": False, "epochs": 1})


def run_example(folder: Path, epochs: int) -> str:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLE), f"--epochs={epochs}", f"--folder={folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def read(printed: str) -> list[dict[str, Any]]:
    """Return what each worker has saved in the last checkpoint."""
    (folder,) = re.findall(r"^checkpoint (.+)$", printed, re.MULTILINE)
    files = sorted(Path(folder).glob("worker-*.pt"))
    return [torch.load(file, weights_only=True) for file in files]


def list_momenta(saved: dict[str, Any]) -> list[torch.Tensor]:
    return [entry["exp_avg"] for entry in saved["optimizer"]["state"].values()]


@pytest.mark.slow
@pytest.mark.distributed
def test_example_votes_and_resumes_with_every_momentum(tmp_path: Path) -> None:
    printed = run_example(tmp_path / "straight", 3)
    # 64 * 128 + 128 + 128 * 10 + 10 parameters: a bit up and a bit down, half to oneself.
    (sent,) = re.findall(r"bytes sent in a step (\d+)", printed)
    assert 9610 / 8 < int(sent) < 2 * 9610 / 8
    (accuracy,) = re.findall(r"test accuracy (\d\.\d+)", printed)
    assert float(accuracy) > 0.75
    run_example(tmp_path / "resumed", 1)
    straight, resumed = read(printed), read(run_example(tmp_path / "resumed", 3))

    assert [saved["epoch"] for saved in straight + resumed] == [2] * 4
    for name, param in straight[0]["model"].items():
        assert torch.equal(param, straight[1]["model"][name])
    for one, other in zip(*map(list_momenta, straight), strict=True):
        assert not torch.equal(one, other), "gradients were averaged before the vote"
    for before, after in zip(straight, resumed, strict=True):
        for name, param in before["model"].items():
            assert torch.equal(param, after["model"][name])
        for one, other in zip(list_momenta(before), list_momenta(after), strict=True):
            assert torch.equal(one, other)
