"""A rank that raises, turns NaN, damages bytes or skips a step, but lives: all stop, none commits.

Ranks survive these, so that one launch meets many accidents, each in a process group of its own.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
import matrix
from accident import (
    ACCIDENT_STEP,
    Report,
    assert_one_step_apart,
    assert_stopped,
    do_step,
    make_optimizer,
    meet_for_step,
    note_accident,
    observe,
)
from cluster import run_workers
from distlion import faults
from failures import give_time, params_of
from tiers import in_tiers

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
# A step writes no checkpoint.
MOMENTS = [(point, 1) for point in faults.POINTS if point != "checkpoint"]
MOMENTS.insert(MOMENTS.index(("framed", 1)) + 1, ("framed", 2))
# Each costs the others a timeout: before it is in an exchange, within it, before and after its end.
QUICK_MOMENTS = [("before_step", 1), ("framed", 2), ("before_commit", 1), ("after_commit", 1)]
OTHERS = (0, 2)

Moment = tuple[Any, int]
Accidents = dict[Moment, tuple[list[Report], int]]


def name(moment: Moment) -> str:
    return f"{moment[0]}{moment[1] if moment[1] > 1 else ''}"


class Interrupted(Exception):
    """Raised by an armed fault."""


def interrupt(optimizer: distlion.DistributedLion, subject: Any) -> None:
    raise Interrupted


def turn_nan(optimizer: distlion.DistributedLion, subject: Any) -> None:
    grad = params_of(optimizer)[1].grad
    assert grad is not None
    grad[3] = torch.nan


def flip_bit(optimizer: distlion.DistributedLion, subject: Any) -> None:
    subject.view(-1)[-1] ^= 1


def meet_all(
    rank: int, world_size: int, action: Callable[..., None], moments: list[Moment], folder: str
) -> list[tuple[Report, int]]:
    """Meet one accident after the other; return each report and how often the fault fired."""
    give_time()
    found = []
    for number, (point, firing) in enumerate(moments):
        scene = Path(folder) / str(number)
        scene.mkdir(exist_ok=True)
        options = {"exchange": distlion.AllReduce(), "process_group": dist.new_group()}
        optimizer = make_optimizer(TIMEOUT_S, options)
        fault = _arm(optimizer, action, point, firing, scene)
        # An optimizer that had not begun its step could go on, and would come back to it.
        goes_on = rank != 1 or action is not interrupt or point != "before_step"
        report = observe(optimizer, rank, None if rank == 1 else scene, goes_on=goes_on)
        found.append((report, fault.fired))
        faults.disarm_all()
    return found


def _arm(
    optimizer: distlion.DistributedLion,
    action: Callable[..., None],
    point: Any,
    firing: int,
    scene: Path,
) -> faults.Fault:
    def happen(subject: Any) -> None:
        if fault.fired == firing:
            note_accident(scene)
            action(optimizer, subject)

    fault = faults.arm(rank=1, step=ACCIDENT_STEP, point=point, action=happen)
    return fault


each_moment = pytest.mark.parametrize(
    "moment",
    in_tiers([(each,) for each in MOMENTS], lambda case: case[0] in QUICK_MOMENTS),
    ids=map(name, MOMENTS),
)


def accident(action: Callable[..., None], moment: Moment) -> tuple[list[Report], int]:
    """Return one accident of those of its tier, which share a launch."""
    quick = moment in QUICK_MOMENTS
    return accidents(action, *(m for m in MOMENTS if (m in QUICK_MOMENTS) == quick))[moment]


@functools.cache
def accidents(action: Callable[..., None], *moments: Moment) -> Accidents:
    with tempfile.TemporaryDirectory() as folder:
        rows = run_workers(meet_all, 3, action, list(moments), folder)
    return {
        moment: ([row[number][0] for row in rows], rows[1][number][1])
        for number, moment in enumerate(moments)
    }


def assert_others_time_out(reports: list[Report], expected_step: int) -> None:
    for rank in OTHERS:
        report = reports[rank]
        assert report.kind == "StepTimeoutError", report.text
        assert report.culprits == (1,)
        assert "rank 1 runs, but did not come to the exchange" in report.text
        assert report.counter == expected_step
        assert_stopped(report)
    assert_one_step_apart(reports)


def assert_others_hear_who_left(reports: list[Report], expected_step: int) -> None:
    for rank in OTHERS:
        report = reports[rank]
        assert report.kind == "PeerLostError", report.text
        assert report.culprits == (1,)
        assert "rank 1 left, and is no longer waited for" in report.text
        assert f"step {ACCIDENT_STEP} failed (Interrupted)" in report.text
        assert report.counter == expected_step
        assert_stopped(report)
    assert_one_step_apart(reports)


@each_moment
def test_rank_that_raises_is_named_by_all_others(moment: Moment) -> None:
    reports, fired = accident(interrupt, moment)
    assert fired == moment[1]
    had_sent_all = moment[0] in ("before_commit", "after_commit")
    if moment[0] == "before_step":  # as anywhere outside of a step: nobody tells the others
        assert_others_time_out(reports, ACCIDENT_STEP)
    else:
        assert_others_hear_who_left(reports, ACCIDENT_STEP + had_sent_all)
    assert reports[1].kind == "Interrupted"
    assert reports[1].counter == ACCIDENT_STEP + (moment[0] == "after_commit")
    if moment[0] != "after_commit":  # that step never returned, so that nobody took its digest
        assert reports[1].final == reports[1].digests[ACCIDENT_STEP]
    if moment[0] != "before_step":
        assert reports[1].afterwards.startswith("ProcessGroupError")


@each_moment
def test_gradient_that_turns_nan_reaches_no_momentum(moment: Moment) -> None:
    reports, fired = accident(turn_nan, moment)
    assert fired >= 1
    if moment[0] == "after_commit":  # overwritten by the next gradient
        assert [report.kind for report in reports] == ["NoneType"] * 3
    elif moment[0] in ("before_step", "after_encode"):
        kind = "NonFiniteError" if moment[0] == "before_step" else "GradientChangedError"
        assert [report.kind for report in reports] == [kind] * 3
        for report in reports:
            assert report.culprits == (1,)
            assert report.committed_step == report.counter == ACCIDENT_STEP
            assert report.final == report.digests[ACCIDENT_STEP]
            assert report.afterwards == "nothing", "training may go on"
    else:
        assert reports[1].kind == "GradientChangedError"
        assert reports[1].culprits == (1,)
        assert reports[1].counter == ACCIDENT_STEP
        assert_stopped(reports[1])
        assert_others_time_out(reports, ACCIDENT_STEP + 1)


@pytest.mark.parametrize("moment", [("framed", 1), ("framed", 2)], ids=["votes", "reply"])
def test_damaged_bytes_are_an_error_on_every_rank(moment: Moment) -> None:
    reports, fired = accidents(flip_bit, ("framed", 1), ("framed", 2))[moment]
    assert fired >= 1
    for report in reports:
        assert report.kind == "CorruptFrameError", report.text
        assert report.culprits == (1,)
        assert report.counter == ACCIDENT_STEP
        assert_stopped(report)


PATTERNS: dict[str, dict[str, Any]] = {
    **{name: {"exchange": pattern} for name, pattern in matrix.PATTERNS.items()},
    "overlap": {"exchange": distlion.AllReduce(), "overlap": True, "bucket_elements": 1024},
}


def leave_out_a_step(rank: int, world_size: int, options: dict[str, Any]) -> Report:
    """Rank 1 leaves out a call of step(), and counts it as done."""
    optimizer = make_optimizer(20.0, options)
    while optimizer.committed_step < ACCIDENT_STEP:
        do_step(optimizer, rank)
    if rank == 1:
        for group in optimizer.param_groups:
            group["step"] += 1
    return observe(optimizer, rank, None, meets=False)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rank_that_leaves_out_a_step_is_named_and_nothing_committed(pattern: str) -> None:
    reports = run_workers(leave_out_a_step, 3, PATTERNS[pattern])
    for rank, report in enumerate(reports):
        assert report.kind == "StepMismatchError", report.text
        assert report.culprits == (1,)
        assert "rank 1: step 3" in report.text
        assert "rank 2: step 2" in report.text
        assert report.committed_step == report.counter == ACCIDENT_STEP + (rank == 1)
        assert report.final == report.digests[report.counter], "something was committed"
        assert report.afterwards.startswith("ProcessGroupError")


kept: list[distlion.DistributedLion] = []


def leave_early(rank: int, world_size: int, folder: str) -> Report | None:
    give_time()
    optimizer = make_optimizer(TIMEOUT_S, {})
    kept.append(optimizer)  # otherwise its connections would close when this returns
    while optimizer.committed_step < ACCIDENT_STEP:
        meet_for_step(optimizer)
        do_step(optimizer, rank)
    if rank == 1:
        note_accident(Path(folder))
        return None
    dist.barrier(dist.new_group([0, 2], use_local_synchronization=True))  # it has left by now
    return observe(optimizer, rank, Path(folder), meets=False)


def test_rank_that_leaves_its_loop_early_is_named_at_the_timeout(tmp_path: Path) -> None:
    reports = run_workers(leave_early, 3, str(tmp_path))
    for rank in OTHERS:
        assert reports[rank].kind == "StepTimeoutError", reports[rank].text
        assert reports[rank].culprits == (1,)
        assert "left the training loop" in reports[rank].text
        assert reports[rank].final == reports[rank].digests[ACCIDENT_STEP]
