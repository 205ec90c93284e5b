"""One exam for every framework that trains with the library: its jobs, its rows, and a sitting."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster import WorkerDiedError, run_workers
from distlion import errors, faults
from integrations.job import VALIDATION, Job, Trained

STEPS, SAVED_AT = 12, 6
EVERY = 4  # steps from one evaluation to the next
POISONED = (1, 3)  # rank and step
KILLED = (1, 5)
SOCKET_BOUND_S = 10.0
"""Until survivors know of a killed rank, whose sockets its kernel has closed."""


@dataclass(frozen=True)
class Report:
    """What one rank says of one job.

    Attributes:
        params: Digest of the parameters.
        momentum: Digest of this rank's own momentum.
        steps: Committed ones.
        losses: Of each of this rank's training batches.
        evaluated: Examples that this rank has evaluated.
        all_reduces: Those of the size of a gradient, in all process groups.
        error: What ended the run, if anything, and
        message: what it said.
        seconds: Of the run.
    """

    params: str = ""
    momentum: str = ""
    steps: int = 0
    losses: tuple[float, ...] = ()
    evaluated: int = 0
    all_reduces: int = 0
    error: type[BaseException] | None = None
    message: str = ""
    seconds: float = 0.0


Reports = dict[str, list[Report]]
"""Of each rank, for each job; a rank that was killed has an empty one."""


@dataclass(frozen=True)
class Row:
    """One question of the exam.

    Attributes:
        name: As in the table of docs/trainers.md.
        jobs: What must have run.
        check: Fails unless what a framework's ranks say is right; the second one is the plain loop.
    """

    name: str
    jobs: tuple[str, ...]
    check: Callable[[Reports, Reports], None]


def plan_jobs(folder: str, world_size: int) -> dict[str, Job]:
    """Return every job by its name, in the order of a sitting: the one that kills a rank last."""
    options: dict[str, dict[str, Any]] = {
        "straight": {"save_at": SAVED_AT},
        "resumed": {"resume": os.path.join(folder, "straight"), "first_step": SAVED_AT},
        "accumulation": {"accumulation": 2},
        "clipping": {"clip_norm": 0.05},
        "overlap": {"overlap": True},
        "overlap and accumulation": {"overlap": True, "accumulation": 2},
        "evaluation": {"evaluation": EVERY},
        "skipped": {"poison": POISONED, "nonfinite": "skip"},
        "poisoned": {"poison": POISONED},
        "killed": {"fault": KILLED},
    }
    return {
        name: Job(os.path.join(folder, name), world_size, STEPS, **each)
        for name, each in options.items()
    }


# What ranks do.


def sit(rank: int, world_size: int, module: str, jobs: list[Job]) -> None:
    """Do jobs one after the other, and leave a report of each in its folder."""
    tell_place(rank, world_size)
    train = importlib.import_module(module).train
    for job in jobs:
        dist.barrier()
        report = _report(train, job, rank)
        (Path(job.folder) / f"report-{rank}").write_bytes(pickle.dumps(report))
        faults.disarm_all()
        gc.collect()  # connections end with their optimizer


def tell_place(rank: int, world_size: int) -> None:
    """Tell a framework what torchrun tells it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    place |= {"LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    os.environ.update({name: str(number) for name, number in place.items()})
    # As torchrun says it; nobody goes there, as the group is made.
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"})


def _report(train: Callable[[Job, int], Trained], job: Job, rank: int) -> Report:
    if job.fault is not None:
        where, step = job.fault
        faults.arm(rank=where, step=step, point="framed", action=_kill)
    start = time.monotonic()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        try:
            trained = train(job, rank)
        except Exception as error:
            seconds = time.monotonic() - start
            return Report(error=type(error), message=str(error), seconds=seconds)
    seconds = time.monotonic() - start
    params = list(trained.model.parameters())
    return Report(
        params=_digest(params),
        momentum=_digest(trained.optimizer.state[param]["exp_avg"] for param in params),
        steps=trained.optimizer.committed_step,
        losses=tuple(trained.model.losses),
        evaluated=trained.model.evaluated,
        all_reduces=_count_all_reduces(profile, min(param.numel() for param in params)),
        seconds=seconds,
    )


def _kill(subject: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _count_all_reduces(profile: torch.profiler.profile, n_elements: int) -> int:
    """Count those of at least so many elements, whether Python or DDP's reducer asked for them."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    # What `profile.events()` makes of these, parents and children, takes seconds.
    return sum(
        any(prod(shape) >= n_elements for shape in event.shapes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "gloo:all_reduce"
    )


# What the tests see.


@functools.cache
def hold_sitting(module: str, world_size: int, names: tuple[str, ...]) -> Reports:
    """Do some of the jobs in one set of processes: frameworks are slow to import."""
    with tempfile.TemporaryDirectory(prefix="distlion-exam-") as folder:
        jobs = {name: job for name, job in plan_jobs(folder, world_size).items() if name in names}
        for job in jobs.values():
            os.mkdir(job.folder)
        timeout_s = 60 + 30 * len(jobs)
        outcomes = run_workers(
            sit, world_size, module, list(jobs.values()), timeout_s=timeout_s, may_die=True
        )
        for rank, outcome in enumerate(outcomes):
            died = isinstance(outcome, WorkerDiedError) and rank == KILLED[0] and "killed" in jobs
            if outcome is not None and not died:
                raise outcome
        return {
            name: [_read(job, rank) for rank in range(world_size)] for name, job in jobs.items()
        }


def _read(job: Job, rank: int) -> Report:
    path = Path(job.folder) / f"report-{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else Report()


def _finished(reports: Reports, job: str) -> list[Report]:
    """Return the reports of a job that must have come to its end on all ranks."""
    for report in reports[job]:
        assert report.error is None, f"{job}: {report.error}: {report.message}"
        assert report.params, f"{job}: a rank made no report"
    return reports[job]


def _has_same_bits(job: str) -> Callable[[Reports, Reports], None]:
    def check(reports: Reports, plain: Reports) -> None:
        for ours, theirs in zip(_finished(reports, job), _finished(plain, job), strict=True):
            assert ours.steps == theirs.steps
            assert repr(ours.losses) == repr(theirs.losses)  # NaN is NaN
            assert ours.params == theirs.params
            assert ours.momentum == theirs.momentum

    return check


def _has_no_all_reduce(reports: Reports, plain: Reports) -> None:
    for job in reports.keys() - {"poisoned", "killed"}:
        assert [report.all_reduces for report in _finished(reports, job)] == [0] * len(reports[job])


def _has_equal_replicas(reports: Reports, plain: Reports) -> None:
    ranks = _finished(reports, "straight")
    assert [rank.steps for rank in ranks] == [STEPS] * len(ranks)
    assert len({rank.params for rank in ranks}) == 1
    # Momenta of workers that have seen other data.
    assert len({rank.momentum for rank in ranks}) == len(ranks)


def _resumes(reports: Reports, plain: Reports) -> None:
    straight, resumed = _finished(reports, "straight"), _finished(reports, "resumed")
    for whole, rest in zip(straight, resumed, strict=True):
        assert rest.steps == whole.steps
        assert rest.losses == whole.losses[SAVED_AT:]
        assert rest.params == whole.params
        assert rest.momentum == whole.momentum


def _overlaps(reports: Reports, plain: Reports) -> None:
    for job in ("overlap", "overlap and accumulation"):
        _has_same_bits(job)(reports, plain)


def _evaluates(reports: Reports, plain: Reports) -> None:
    _has_same_bits("evaluation")(reports, plain)
    evaluated = sum(report.evaluated for report in reports["evaluation"])
    assert evaluated == len(VALIDATION) * (STEPS // EVERY)


def _raises_of_nan(reports: Reports, plain: Reports) -> None:
    for report in reports["poisoned"]:
        assert report.error is errors.NonFiniteError, report.message
        assert f"step {POISONED[1]}" in report.message
        assert f"rank {POISONED[0]}" in report.message


def _skips_nan(reports: Reports, plain: Reports) -> None:
    _has_same_bits("skipped")(reports, plain)
    assert {report.steps for report in reports["skipped"]} == {STEPS - 1}


def _ends_with_killed(reports: Reports, plain: Reports) -> None:
    for rank, report in enumerate(reports["killed"]):
        if rank == KILLED[0]:
            assert report == Report(), "the fault did not fire"
        else:
            assert report.error is errors.PeerLostError, report.message
            assert f"rank {KILLED[0]}" in report.message
            assert report.seconds < SOCKET_BOUND_S


ROWS: tuple[Row, ...] = (
    Row("no all-reduce of gradients", ("straight",), _has_no_all_reduce),
    Row("replicas bitwise identical", ("straight",), _has_equal_replicas),
    Row("same bits as a plain loop", ("straight",), _has_same_bits("straight")),
    Row("resumed, with every rank's momentum", ("straight", "resumed"), _resumes),
    Row("gradient accumulation", ("accumulation",), _has_same_bits("accumulation")),
    Row("clipping", ("clipping",), _has_same_bits("clipping")),
    Row("overlap", ("overlap", "overlap and accumulation"), _overlaps),
    Row("evaluation", ("evaluation",), _evaluates),
    Row("NaN on one rank raises on all", ("poisoned",), _raises_of_nan),
    Row("NaN on one rank is skipped by all", ("skipped",), _skips_nan),
    Row("a killed rank ends all", ("killed",), _ends_with_killed),
)
