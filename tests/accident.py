"""Let one rank have an accident at a fault point, and tell how all ranks come out of it."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distlion
import oracle
from cluster import WorkerDiedError, run_workers
from distlion import errors, faults
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire
from failures import give_time, params_of
from replay import run_backward

AT_ONCE = 4
STEPS = 5
# Digests of the replicas are compared in the first step only: the accident is in a later one.
ACCIDENT_STEP = 2


@dataclass(frozen=True)
class Accident:
    """A fault: its kind, its victim and its moment.

    Attributes:
        point: The fault point.
        firing: Which time the point is met in that step, counted from 1.
        kind: "kill", "stop" (until all others have failed), or "late": the rank runs, and waits
            until all others have failed.
        victim: The rank.
        busy: A rank that computes until another one has failed.
        world_size: Of how many.
        timeout_s: ``Timeouts.step_s``.
        options: Further arguments of the optimizer.
        wire: The transport of votes; by default that of this process.
    """

    point: Any
    firing: int = 1
    kind: str = "kill"
    victim: int = 1
    busy: int | None = None
    world_size: int = 3
    timeout_s: float = 20.0
    options: dict[str, Any] = field(default_factory=dict)
    wire: str = field(default_factory=choose_wire)


@dataclass(frozen=True)
class Report:
    """How one rank came out.

    Attributes:
        kind, text, culprits, step, committed_step: Of the error; "NoneType" without one.
        digests: After each number of committed steps: that of parameters and momenta, and that of
            parameters.
        final: The same two after the error.
        counter: ``committed_step`` of the optimizer after the error.
        afterwards: What the next step raised.
    """

    kind: str
    text: str
    culprits: tuple[int, ...]
    step: int | None
    committed_step: int | None
    digests: dict[int, tuple[str, str]]
    final: tuple[str, str]
    counter: int
    afterwards: str


def digest_state(optimizer: distlion.DistributedLion) -> tuple[str, str]:
    """Digest parameters and momenta, and parameters alone."""
    params = params_of(optimizer)
    momenta = [optimizer.state[p]["exp_avg"] for p in params]
    return _digest([*params, *momenta]), _digest(params)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()


def make_optimizer(timeout_s: float, options: dict[str, Any]) -> distlion.DistributedLion:
    params = [
        (f"p{index}", torch.nn.Parameter(torch.full((n,), 0.5)))
        for index, n in enumerate((700, 1300, 2100))
    ]
    limits = {"timeouts": distlion.Timeouts(step_s=timeout_s, busy_s=timeout_s)}
    return distlion.DistributedLion(params, lr=1e-2, **{**limits, **options})


def do_step(optimizer: distlion.DistributedLion, rank: int) -> None:
    optimizer.zero_grad()
    grads: list[oracle.F32 | None] = [
        oracle.gradient(5, optimizer.committed_step, rank, index, p.numel())
        for index, p in enumerate(params_of(optimizer))
    ]
    run_backward(optimizer, grads)
    optimizer.step()


def meet_accident(rank: int, world_size: int, accident: Accident, folder: str) -> Report:
    """Train until an error; on the victim, let the accident happen."""
    scene = Path(folder)
    give_time()
    optimizer = make_optimizer(accident.timeout_s, accident.options)
    if rank == accident.victim:
        _arm(accident, scene)
    if rank == accident.busy:
        _keep_busy(accident, scene)
    if rank == accident.victim:
        return observe(optimizer, rank, None)
    report = observe(optimizer, rank, scene, innocents=_list_innocents(accident))
    (scene / f"failed{rank}").touch()
    if accident.kind != "kill":
        _tell_victim(accident, scene)
    return report


def _list_innocents(accident: Accident) -> list[int]:
    return [rank for rank in range(accident.world_size) if rank != accident.victim]


def observe(
    optimizer: distlion.DistributedLion,
    rank: int,
    scene: Path | None,
    *,
    goes_on: bool = True,
    meets: bool = True,
    innocents: Sequence[int] = (),
) -> Report:
    """Train until an error, or the last step; then try one more, if the rank ``goes_on``.

    ``scene`` is where the accident was noted; None on the victim. A rank ``meets`` all others for
    every step up to that of the accident, so that whoever is slow is not taken for lost.
    Afterwards each of the ``innocents`` waits until every other one has committed that step or
    failed.
    """
    caught: Exception | None = None
    digests = {optimizer.committed_step: digest_state(optimizer)}
    try:
        while optimizer.committed_step < STEPS:
            if meets:
                meet_for_step(optimizer)
            do_step(optimizer, rank)
            digests[optimizer.committed_step] = digest_state(optimizer)
            if scene is not None and optimizer.committed_step > ACCIDENT_STEP:
                _await_commits(scene, rank, optimizer.committed_step, innocents)
    except Exception as error:
        caught = error
    if scene is not None:
        assert (scene / "accident").exists(), caught
    return Report(
        kind=type(caught).__name__,
        text=str(caught),
        culprits=getattr(caught, "culprits", ()),
        step=getattr(caught, "step", None),
        committed_step=getattr(caught, "committed_step", None),
        digests=digests,
        final=digest_state(optimizer),
        counter=optimizer.committed_step,
        afterwards=_raised_by(lambda: do_step(optimizer, rank)) if goes_on else "",
    )


def meet_for_step(optimizer: distlion.DistributedLion) -> None:
    """Wait for all ranks before a step, up to that of the accident."""
    if optimizer.committed_step <= ACCIDENT_STEP:
        dist.barrier()


def _await_commits(scene: Path, rank: int, step: int, innocents: Sequence[int]) -> None:
    (scene / f"committed{step}by{rank}").touch()
    for other in innocents:
        notes = scene / f"committed{step}by{other}", scene / f"failed{other}"
        while not any(note.exists() for note in notes):
            time.sleep(0.01)


def _raised_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _arm(accident: Accident, scene: Path) -> None:
    def happen(subject: object) -> None:
        if fault.fired != accident.firing:
            return
        note_accident(scene)
        if accident.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif accident.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            compute_until((scene / "go").exists)

    fault = faults.arm(
        rank=accident.victim, step=ACCIDENT_STEP, point=accident.point, action=happen
    )


def note_accident(scene: Path) -> None:
    """Note that the accident has happened, and to which process."""
    (scene / "accident").write_text(f"{os.getpid()}")


def compute_until(is_over: Callable[[], bool]) -> None:
    """Be as busy as a rank in its forward pass."""
    matrix = torch.eye(64)
    while not is_over():
        matrix = matrix @ matrix


def _keep_busy(accident: Accident, scene: Path) -> None:
    """Let a rank be late for the step of the accident until somebody else has failed."""
    witness = next(
        rank for rank in range(accident.world_size) if rank not in (accident.busy, accident.victim)
    )
    faults.arm(
        rank=accident.busy or 0,
        step=ACCIDENT_STEP,
        point="before_step",
        action=lambda subject: compute_until((scene / f"failed{witness}").exists),
    )


def _tell_victim(accident: Accident, scene: Path) -> None:
    """Let the victim go on once every other rank has failed: the last one sees all the others."""
    if not all((scene / f"failed{rank}").exists() for rank in _list_innocents(accident)):
        return
    if accident.kind == "stop":
        os.kill(int((scene / "accident").read_text()), signal.SIGCONT)
    else:
        (scene / "go").touch()


def stage_all(accidents: dict[str, Accident]) -> dict[str, list[Any]]:
    """Let all happen, a few at once, as ranks mostly wait.

    Returns:
        For each, a Report for each rank, or WorkerDiedError for one that was killed.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(accidents, pool.map(_stage, accidents.values()), strict=True))


def _stage(accident: Accident) -> list[Any]:
    environment = {WIRE_VARIABLE: accident.wire}
    with tempfile.TemporaryDirectory(prefix="distlion-test-") as folder:
        return run_workers(
            meet_accident,
            accident.world_size,
            accident,
            folder,
            may_die=True,
            timeout_s=40,
            environment=environment,
        )


def assert_survivors_stopped(
    accident: Accident, reports: list[Any], kind: type[errors.StepError]
) -> list[Report]:
    """Assert what is promised to every rank but the victim; return their reports."""
    survivors = []
    for rank, report in enumerate(reports):
        if rank == accident.victim:
            continue
        assert isinstance(report, Report), report
        assert report.kind == kind.__name__, report.text
        assert report.culprits == (accident.victim,), report.text
        assert f"rank {accident.victim}" in report.text
        assert_stopped(report)
        survivors.append(report)
    assert_one_step_apart(survivors)
    return survivors


def assert_stopped(report: Report) -> None:
    """Assert that a rank is as it was after its last committed step, and steps no more."""
    assert report.committed_step == report.step == report.counter == max(report.digests)
    assert report.final == report.digests[report.counter], "the state was changed after the commit"
    assert report.afterwards.startswith("ProcessGroupError"), report.afterwards
    assert report.kind in report.afterwards


def assert_one_step_apart(reports: list[Report]) -> None:
    """Assert that ranks stand a step apart at most, and had equal parameters after equal steps."""
    counters = [report.counter for report in reports]
    assert max(counters) - min(counters) <= 1, counters
    for step in range(min(counters) + 1):
        # Where a step raised after its commit, what it left behind is the state after that step.
        assert len({report.digests.get(step, report.final)[1] for report in reports}) == 1


def assert_died(outcome: Any) -> None:
    assert isinstance(outcome, WorkerDiedError), outcome
