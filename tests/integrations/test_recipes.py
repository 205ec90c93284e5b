"""The papers' recipes in their tiny forms: they learn, and go on as if never interrupted."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from distlion.checkpoint.folder import encode_latest, find_checkpoint

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def start(recipe: str, *options: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launch, str(RECIPES / recipe), *map(str, options)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(recipe: str, *options: object, cwd: Path) -> str:
    finished = start(recipe, *options, cwd=cwd)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def find(pattern: str, printed: str) -> float:
    (value,) = re.findall(pattern, printed)
    return float(value)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint: the model's, and every worker's."""
    files = sorted(find_checkpoint(folder).rglob("*.safetensors"))
    assert sum("worker-" in file.name for file in files) == 2
    found = {f"{file.name}/{k}": v for file in files for k, v in load_file(file).items()}
    assert found
    return found


RESUMED = [
    ("vit.py", ("--tiny", "--steps", 12)),
    ("gpt2.py", ("--tiny", "--steps", 12)),
]


@pytest.mark.parametrize(("recipe", "options"), RESUMED, ids=lambda value: str(value)[:8])
def test_a_recipe_that_goes_on_ends_with_the_same_bits(
    recipe: str, options: tuple[object, ...], tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    saving = ("--save-every", 6)
    printed = run(recipe, *options, *saving, "--folder", straight, cwd=tmp_path)
    run(recipe, *options, *saving, "--folder", broken, cwd=tmp_path)
    newest = sorted(path for path in broken.iterdir() if path.is_dir())[-1]
    forget(broken, newest)
    resumed = run(recipe, *options, *saving, "--folder", broken, "--resume", cwd=tmp_path)
    assert "goes on after step 6" in resumed
    last = re.findall(r"^step 12  .*", printed, re.MULTILINE)[-1]
    assert last in resumed
    one, other = read_tensors(straight), read_tensors(broken)
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def forget(folder: Path, newest: Path) -> None:
    """Take the newest checkpoint away, as if the run had ended before it."""
    (before,) = [path for path in folder.iterdir() if path.is_dir() and path != newest]
    (folder / "latest").write_bytes(encode_latest(before.name))
    newest.rename(folder.parent / "taken away")


def test_vit_learns_digits(tmp_path: Path) -> None:
    printed = run("vit.py", "--tiny", cwd=tmp_path)
    assert find(r"accuracy (\d\.\d+) of 261 pictures", printed) > 0.6


def draw_pictures(folder: Path) -> None:
    """Draw 48 pictures of two classes: bright above, or bright below."""
    for split, n in (("train", 16), ("validation", 8)):
        for number in range(2 * n):
            is_below = number % 2 == 1
            pixels = Image.new("RGB", (20, 16), (20, number, 20))
            top = 8 if is_below else 0
            pixels.paste((220, 220, number), (0, top, 20, top + 8))
            path = folder / split / ("below" if is_below else "above") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels.save(path)


@pytest.mark.parametrize("streaming", [(), ("--streaming", "--examples", 32)], ids=["", "stream"])
def test_vit_reads_folders_of_pictures(streaming: tuple[object, ...], tmp_path: Path) -> None:
    draw_pictures(tmp_path / "data")
    reading = ("--data", tmp_path / "data", *streaming, "--loaders", 0 if streaming else 1)
    printed = run(
        "vit.py", "--tiny", *reading, "--batch", 4, "--steps", 60, "--lr", 3e-3, cwd=tmp_path
    )
    assert find(r"accuracy (\d\.\d+) of 16 pictures", printed) > 0.9


def test_gpt2_learns_and_reads_files(tmp_path: Path) -> None:
    printed = run("gpt2.py", "--tiny", cwd=tmp_path)
    assert find(r"step 100  (\d\.\d+) nats", printed) < 3.5  # begins with ln 257 = 5.5
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"{number} bottles of beer on the wall. " * 50)
    printed = run("gpt2.py", "--tiny", "--data", "*.txt", "--steps", 40, cwd=tmp_path)
    assert find(r"step 40  (\d\.\d+) nats", printed) < 4


@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_instructions_are_learned_and_training_goes_on(
    lora: tuple[str, ...], tmp_path: Path
) -> None:
    printed = run("instruct.py", "--tiny", *lora, cwd=tmp_path)
    n_trained = find(r"(\d+) parameters trained", printed)
    assert n_trained == (34_816 if lora else 85_312)
    assert find(r"(\d\.\d+) nats", printed) < (2.8 if lora else 1.2)  # begins with ln 23 = 3.1
    # A bit up and a bit down for each parameter that is trained, half to oneself; and frames.
    assert n_trained / 8 < find(r"bytes sent in a step (\d+)", printed) < 1.2 * n_trained / 8
    run("instruct.py", "--tiny", *lora, "--steps", 220, "--resume", cwd=tmp_path)
    states = (tmp_path / "runs" / "instruct" / "checkpoint-220" / "trainer_state.json").read_text()
    evaluated = [each["step"] for each in json.loads(states)["log_history"] if "eval_loss" in each]
    assert evaluated[0] == 100  # in the first training; one of 220 steps evaluates at 110


def load(recipe: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module(recipe)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_workers_share_all_texts_but_those_held_out(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = load("gpt2", monkeypatch)
    texts = gpt2.open_texts(SimpleNamespace(data=None))
    whole = [row["text"] for row in texts]
    held_out = frozenset(row["text"] for row in texts.take(8))
    for epoch in range(3):
        dealt = [
            text
            for rank in range(size)
            for text in gpt2.deal(texts, held_out, SimpleNamespace(rank=rank, size=size), epoch)
        ]
        assert sorted(dealt) == sorted(text for text in whole if text not in held_out)


def test_instructions_become_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    instruct = load("instruct", monkeypatch)
    rows = [{"instruction": "Add.", "input": text, "output": "3"} for text in ("1 and 2", "")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given, bare = instruct.open_data(str(tmp_path / "rows.jsonl"))
    assert given["completion"] == bare["completion"] == "3"
    assert "1 and 2" in given["prompt"]
    assert "Input" not in bare["prompt"]
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}')
    with pytest.raises(SystemExit, match="expected prompt and completion"):
        instruct.open_data(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("recipe", "options", "text"),
    [
        ("vit.py", (), "--data: a folder of pictures"),
        ("vit.py", ("--data", "nowhere/at-all"), "nowhere/at-all"),
        ("gpt2.py", (), "--data: a data set's name"),
        ("instruct.py", (), "--data: a data set such as"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    recipe: str, options: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    finished = start(recipe, *options, cwd=tmp_path)
    assert finished.returncode != 0
    assert text in finished.stderr


def test_a_recipe_without_torchrun_says_how_to_start_it(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(RECIPES / "gpt2.py"), "--tiny"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("start this with torchrun")
