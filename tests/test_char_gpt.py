"""The scripts of examples/char_gpt train, evaluate on rank 0 alone, and resume after a crash."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster import WorkerDiedError, run_workers
from distlion import faults
from distlion.errors import PeerLostError

pytestmark = pytest.mark.distributed

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "char_gpt"
N = 2
ITERATIONS, EVERY, LAST_SAVED, CRASH_AT = 9, 2, 4, 5
FIRST_SCALE = 2.0**18
SKIPPED = 1
"""Iterations that overflow at this scale, and at halves of it: the first ones."""
CRASH_LEAVES = f"step-{LAST_SAVED - SKIPPED:012d}"
MOST_CHANGED_LINES = 40
RESUME = "--init-from=resume"
TINY = (
    "--eval-batches=1 --batch-size=2 --context=16 --layers=1 --width=16 --dropout=0.1 "
    f"--dtype=float16 --init-scale={FIRST_SCALE} --iterations={ITERATIONS} --eval-every={EVERY}"
).split()


@dataclass(frozen=True)
class Run:
    """What a run leaves behind on one rank.

    Attributes:
        tensors: Parameters and what the optimizer keeps, by name.
        scale: Of the GradScaler.
        committed: Steps that the optimizer has committed, or 0 if it does not count them.
        drawn: Batches of training and of validation.
        printed: What it has printed.
    """

    tensors: dict[str, torch.Tensor]
    scale: float
    committed: int
    drawn: Counter[str]
    printed: str


def play(
    rank: int,
    n: int,
    ports: list[int],
    scripts: list[tuple[str, list[str]]],
    victim: int | None = None,
) -> list[Run]:
    """Run scripts one after the other, as torchrun would; kill one rank in a step of the last.

    Each script has a store of its own, as each start of torchrun has: two default groups in one
    store would read each other's addresses.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.path.insert(0, str(FOLDER))
    if rank == victim:
        faults.arm(rank=rank, step=CRASH_AT - SKIPPED, point="after_encode", action=kill)
    found = []
    for port, (script, options) in zip(ports, scripts, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        found.append(run_script(FOLDER / script, options))
    return found


def kill(subject: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_script(path: Path, options: list[str]) -> Run:
    """Run a script in this process, count the batches that it draws, and read its variables."""
    import gpt  # type: ignore[import-not-found]

    drawn: Counter[str] = Counter()
    draw, printed = gpt.Text.draw, io.StringIO()

    def count(text: Any, part: str, batch_size: int) -> Any:
        drawn[part] += 1
        return draw(text, part, batch_size)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [path.name, *options])
        patch.setattr(gpt.Text, "draw", count)
        left = runpy.run_path(str(path), run_name="__main__")
    model = left.get("raw_model", left["model"])
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        kept = left["optimizer"].state[param].items()
        tensors |= {f"{key} of {name}": each for key, each in kept if torch.is_tensor(each)}
    committed = getattr(left["optimizer"], "committed_step", 0)
    return Run(tensors, left["scaler"].get_scale(), committed, drawn, printed.getvalue())


@dataclass(frozen=True)
class Story:
    """Runs of both ranks: to the end, and resumed half-way; and how a crash ended them."""

    before: tuple[Run, ...]
    before_resumed: tuple[Run, ...]
    after: tuple[Run, ...]
    crash: tuple[Any, ...]
    resumed: tuple[Run, ...]


@functools.cache
def tell() -> Story:
    """Play all of it in three launches."""
    with tempfile.TemporaryDirectory(prefix="distlion-test-") as name:
        ddp, whole, cut = ([*TINY, f"--folder={name}/{kind}"] for kind in ("ddp", "whole", "cut"))
        scripts = [("before.py", ddp), ("before.py", [*ddp, RESUME]), ("after.py", whole)]
        before, before_resumed, after = zip(*launch(scripts), strict=True)
        crash = launch([("after.py", cut)], victim=1, may_die=True)
        assert max(path.name for path in Path(name, "cut").glob("step-*")) == CRASH_LEAVES
        (resumed,) = zip(*launch([("after.py", [*cut, RESUME])]), strict=True)
    return Story(before, before_resumed, after, tuple(crash), resumed)


def launch(scripts: list[tuple[str, list[str]]], victim: int | None = None, **options: Any) -> Any:
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scripts
    ]
    ports = [store.port for store in stores]
    return run_workers(
        play, N, ports, scripts, victim, process_group=False, timeout_s=240, **options
    )


def differing(runs: tuple[Run, ...], others: tuple[Run, ...]) -> list[str]:
    """Name what differs, bit by bit, of any rank."""
    return [
        f"rank {rank}: {name}"
        for rank, (run, other) in enumerate(zip(runs, others, strict=True))
        for name in run.tensors.keys() | other.tensors.keys()
        if not torch.equal(run.tensors[name], other.tensors[name])
    ]


@pytest.mark.slow
def test_replicas_agree_and_losses_fall() -> None:
    for runs in (tell().before, tell().after):
        first, second = (run.tensors for run in runs)
        params = [name for name in first if " of " not in name]
        assert all(torch.equal(first[name], second[name]) for name in params)
        losses = [float(each) for each in re.findall(r"validation loss (\S+)", runs[0].printed)]
        assert len(losses) == 1 + ITERATIONS // EVERY
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_gradients_are_scaled_and_a_step_is_skipped_on_all_workers_if_one_overflows() -> None:
    assert [run.committed for run in tell().after] == [ITERATIONS - SKIPPED] * N
    assert [run.scale for run in tell().after] == [FIRST_SCALE / 2**SKIPPED] * N


@pytest.mark.slow
def test_only_rank_0_evaluates() -> None:
    for first, second in (tell().before, tell().after):
        assert first.drawn["validation"] == 1 + ITERATIONS // EVERY
        assert second.drawn["validation"] == 0
        assert first.drawn["train"] == second.drawn["train"] == 2 * ITERATIONS
        assert "loss" not in second.printed


@pytest.mark.slow
def test_run_with_ddp_resumes_with_the_bits_of_an_uninterrupted_one() -> None:
    assert tell().before_resumed[0].drawn["train"] < tell().before[0].drawn["train"]
    assert differing(tell().before_resumed, tell().before) == []


@pytest.mark.slow
def test_run_with_votes_resumes_after_a_crash_with_the_bits_of_an_uninterrupted_one() -> None:
    survivor, victim = tell().crash
    assert isinstance(survivor, PeerLostError)
    assert isinstance(victim, WorkerDiedError)
    assert tell().resumed[0].drawn["train"] == 2 * (ITERATIONS - LAST_SAVED)
    assert differing(tell().resumed, tell().after) == []
    assert any("exp_avg" in name for name in tell().after[0].tensors)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["before.py", "after.py"])
def test_script_learns_and_resumes_under_torchrun(script: str, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--dtype=float16", "--init-scale=256", f"--folder={tmp_path}"]
    losses = []
    for more in ([], [RESUME, "--iterations=250"]):
        ended = subprocess.run(
            [*start, str(FOLDER / script), *options, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        losses.append([float(x) for x in re.findall(r"validation loss (\S+)", ended.stdout)])
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert losses[1][0] == losses[0][-1]  # evaluated again where the run resumes
    assert losses[1][-1] < losses[0][-1]


def test_one_script_is_a_small_change_of_the_other() -> None:
    """What a reader sees of ``diff -u before.py after.py``."""
    before, after = ((FOLDER / f"{name}.py").read_text() for name in ("before", "after"))
    changed = [
        line
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert len(changed) <= MOST_CHANGED_LINES
