"""Plain training scripts end by themselves, with a traceback that names the rank that failed."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest

import endings

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TIMEOUT_S = 3.0
FAR_S = 60.0
"""Step timeout where a connection closes: the error must come long before."""

TRAIN = """
import os, signal
import torch, torch.distributed as dist
import distlion
from distlion.wire import watch
from failures import give_time

give_time()
watch.CALM_S = 60.0  # rank 0 keeps the store: blame it too if a busy rank sees its end late
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
dist.init_process_group("gloo")
model = torch.nn.Linear(40, 30)
timeouts = distlion.Timeouts(step_s={timeout_s})
optimizer = distlion.DistributedLion(model.parameters(), lr=1e-3, timeouts=timeouts)
for step in range({n_steps}):
    model(torch.randn(4, 40)).square().mean().backward()
    if rank == {victim} and step == 3:
        open(os.environ["FAILED"], "w").close()
        {act}
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Scene:
    """Who fails, and how."""

    victim: int
    act: str


SCENES = {
    "rank 1 is stopped": Scene(1, "os.kill(os.getpid(), signal.SIGSTOP)"),
    "rank 1 is killed": Scene(1, "os.kill(os.getpid(), signal.SIGKILL)"),
    "rank 1 raises": Scene(1, "raise ValueError('a mishap')"),
    "rank 0 is killed": Scene(0, "os.kill(os.getpid(), signal.SIGKILL)"),
    "rank 0 is stopped": Scene(0, "os.kill(os.getpid(), signal.SIGSTOP)"),
}
LENGTHS = {"right after construction": 0, "after one step": 1}


@dataclass(frozen=True)
class Ending:
    """How one rank's process ended."""

    status: int
    text: str


def run_scripts(scenes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, endings.__file__, folder],
            input=json.dumps(scenes),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def make_scene(victim: int | None, act: str, n_steps: int) -> dict[str, Any]:
    timeout_s = TIMEOUT_S if "SIGSTOP" in act else FAR_S
    script = TRAIN.format(victim=victim, act=act, n_steps=n_steps, timeout_s=timeout_s)
    return {"victim": victim, "script": script}


@functools.cache
def all_rows() -> dict[str, list[dict[str, Any]]]:
    """Run all scenes and some scripts that come to their end, in one launch."""
    failing = [make_scene(scene.victim, scene.act, 100_000) for scene in SCENES.values()]
    ending = [make_scene(None, "pass", n_steps) for n_steps in LENGTHS.values()]
    return dict(zip([*SCENES, *LENGTHS], run_scripts(failing + ending), strict=True))


def endings_of(name: str) -> list[Ending]:
    rows = all_rows()[name]
    assert all(row["has_failed"] for row in rows)
    return [Ending(row["status"], row["text"]) for row in rows]


def assert_ended(ending: Ending, *fragments: str) -> None:
    """Assert an end by one uncaught error without a cause, whose last line has all fragments."""
    assert ending.status == 1, f"exit status {ending.status}: {ending.text}"
    assert ending.text.count("Traceback") == 1, ending.text
    last = next(line for line in reversed(ending.text.splitlines()) if "Error: " in line)
    for fragment in fragments:
        assert fragment in last, ending.text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("rank 1 is stopped", "StepTimeoutError"),
        ("rank 1 is killed", "PeerLostError"),
        ("rank 1 raises", "PeerLostError"),
    ],
)
def test_script_ends_by_itself_and_names_the_rank(name: str, error: str) -> None:
    endings = endings_of(name)
    for rank in (0, 2):
        assert_ended(endings[rank], error, "rank 1")


@pytest.mark.parametrize("name", ["rank 1 is stopped", "rank 0 is stopped"])
def test_script_that_was_stopped_ends_too_once_it_goes_on(name: str) -> None:
    ending = endings_of(name)[SCENES[name].victim]
    assert_ended(ending, "distlion.errors")


def test_script_names_rank_0_when_it_kept_the_store_and_is_gone() -> None:
    for rank in (1, 2):
        ending = endings_of("rank 0 is killed")[rank]
        assert_ended(ending, "PeerLostError", "rank 0 is gone", "kept the store")


def test_script_ends_by_itself_when_the_host_of_the_store_is_stopped() -> None:
    for rank in (1, 2):
        ending = endings_of("rank 0 is stopped")[rank]
        assert_ended(ending, "StepTimeoutError", "the store")


def assert_ended_well(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["status"] == 0, row["text"]


@pytest.mark.parametrize("length", LENGTHS)
def test_script_that_ends_after_its_last_step_ends_well(length: str) -> None:
    assert_ended_well(all_rows()[length])


@pytest.mark.slow
def test_script_that_ends_after_its_last_step_ends_well_every_time() -> None:
    for rows in run_scripts([make_scene(None, "pass", number % 3) for number in range(20)]):
        assert_ended_well(rows)
