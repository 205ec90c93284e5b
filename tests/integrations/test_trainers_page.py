"""docs/how-to/trainers says what the list of contestants says; its scripts are the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.contestants import CONTESTANTS
from integrations.exam import ROWS

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
EXAMPLES = {
    ("trainers/hugging-face", "Hugging Face: Trainer, SFTTrainer and others of TRL"): (
        "02_hf_trainer.py"
    ),
    ("trainers/accelerate", "Accelerate"): "03_accelerate.py",
    ("trainers/lightning", "Lightning"): "04_lightning.py",
    ("trainers/lightning", "Fabric"): "05_fabric.py",
    ("trainers/torchtitan", "torchtitan"): "06_torchtitan.py",
    ("trainers/ray", "Ray Train"): "07_ray.py",
    ("several-gpus", "FSDP2"): "08_fsdp2.py",
}
ALIKE = {"03_accelerate.py": 1, "04_lightning.py": 1, "05_fabric.py": 1, "08_fsdp2.py": 2}
"""Examples that take the same options and say the same, and ranks of each of two workers."""


def shorten(code: str) -> str:
    """Leave out what a formatter may change."""
    return re.sub(r",\)", ")", re.sub(r"\s", "", code))


def test_frameworks_and_features_are_those_of_the_exam() -> None:
    text = (HOW_TO / "trainers" / "index.md").read_text()
    section = text.split("## What is tested\n")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[2:]
    assert rows == [(each.name, each.tested_with) for each in CONTESTANTS]
    assert re.findall(r"^- (.+)$", section, re.MULTILINE) == [row.name for row in ROWS]
    # The page says that every framework passes all of them.
    assert [each.name for each in CONTESTANTS if each.lacks] == []


@pytest.mark.parametrize(("page", "section"), EXAMPLES)
def test_at_most_three_lines_change_and_they_are_those_of_the_example(
    page: str, section: str
) -> None:
    text = (HOW_TO / f"{page}.md").read_text()
    before = r"(?:(?!#|```)[^\n]*\n)*"  # no other heading, no other block
    code = re.search(rf"^##? {section}\n{before}```diff\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    added = [line[1:].strip() for line in code[1].splitlines() if line.startswith("+")]
    example = (ROOT / "examples" / EXAMPLES[page, section]).read_text()
    assert 1 <= len(added) <= 3
    for line in added:
        assert shorten(line.removeprefix("strategy=")) in shorten(example)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("example", ALIKE)
def test_example_trains_and_resumes_under_torchrun(example: str, tmp_path: Path) -> None:
    n_ranks = 2 * ALIKE[example]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={n_ranks}"]
    script = [str(ROOT / "examples" / example), f"--folder={tmp_path / 'runs'}"]
    # Nobody removes the checkpoints of one before the next.
    for options in (["--before", "--epochs=1"], ["--epochs=4"], ["--epochs=6", "--resume"]):
        finished = subprocess.run(
            [*launch, *script, *options],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        if "--before" in options:
            assert "bytes sent" not in finished.stdout
            continue
        # 64 * 128 + 128 + 128 * 10 + 10 parameters: a bit up and a bit down, half to oneself.
        (sent,) = re.findall(r"bytes sent in a step (\d+)", finished.stdout)
        assert 9610 / 8 < int(sent) * ALIKE[example] < 2.5 * 9610 / 8
        (accuracy,) = re.findall(r"test accuracy (\d\.\d+)", finished.stdout)
        assert float(accuracy) > 0.7  # of ten digits, after four epochs
