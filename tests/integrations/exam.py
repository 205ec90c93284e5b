"""One exam for every framework that trains with the library: its jobs, its rows, and a sitting."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cluster import WorkerDiedError, run_workers
from distlion import errors, faults
from integrations.contestants import Contestant
from integrations.job import VALIDATION, Job, Trained

STEPS, SAVED_AT = 12, 6
EVERY = 4  # steps from one evaluation to the next
POISONED = (1, 3)  # rank and step
KILLED = (1, 5)
TESTS = Path(__file__).resolve().parents[1]
SECONDS_PER_RANK, SECONDS_PER_JOB = 60, 60
"""Limits of a sitting: frameworks are slow to import."""


@dataclass(frozen=True)
class Report:
    """What one rank says of one job.

    Attributes:
        params: Digest of the parameters, whole.
        momentum: Digest of this worker's own momentum, whole.
        steps: Committed ones.
        losses: Of each of this rank's training batches.
        evaluated: Examples that this rank has evaluated.
        all_reduces: Those of the size of a gradient, in all process groups.
        error: What ended the run, if anything, and
        message: what it said.
    """

    params: str = ""
    momentum: str = ""
    steps: int = 0
    losses: tuple[float, ...] = ()
    evaluated: int = 0
    all_reduces: int = 0
    error: type[BaseException] | None = None
    message: str = ""


Reports = dict[str, list[Report]]
"""Of each rank, for each job; a rank that was killed has an empty one. Ranks of a worker follow
each other; of the plain loop each is a worker."""


@dataclass(frozen=True)
class Row:
    """One question of the exam.

    Attributes:
        name: As in the list of docs/how-to/trainers/index.md.
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
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, record_shapes=True) as profile,
        _watch_all_reduces() as alone,
    ):
        try:
            trained = train(job, rank)
        except Exception as error:
            return Report(error=type(error), message=str(error))
    params = list(trained.model.parameters())
    return Report(
        params=_digest(params),
        momentum=_digest(_list_momenta(trained, rank * job.world_size // dist.get_world_size())),
        steps=trained.optimizer.committed_step,
        losses=tuple(trained.model.losses),
        evaluated=trained.model.evaluated,
        all_reduces=_count_all_reduces(profile, params, alone),
    )


def _kill(subject: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _list_momenta(trained: Trained, worker: int) -> Iterable[torch.Tensor]:
    """Return those of a worker; what is sharded is put together first."""
    for param in trained.model.parameters():
        if not isinstance(param, DTensor):
            yield trained.optimizer.state[param]["exp_avg"]
    if any(isinstance(param, DTensor) for param in trained.model.parameters()):
        for entry in trained.optimizer.state_dict()["state"].values():
            yield entry["exp_avg"].full_tensor()[worker]


@contextmanager
def _watch_all_reduces() -> Iterator[list[int]]:
    """Yield the sizes of those in a group of one rank, which send nothing: FSDP2 asks for them."""
    alone: list[int] = []
    call = dist.all_reduce

    def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if group is not None and group.size() == 1:
            alone.append(tensor.numel())
        return call(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", note):
        yield alone


def _count_all_reduces(
    profile: torch.profiler.profile, params: Sequence[torch.Tensor], alone: Sequence[int]
) -> int:
    """Count those of gradients, whether Python or DDP's reducer asked for them.

    What workers average is at least as large as the smallest parameter, or this rank's shard of it.
    Inside a worker, Gloo makes FSDP2's reduce-scatter of a layer out of an all-reduce of all of it.
    """
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    local = [param.to_local() if isinstance(param, DTensor) else param for param in params]
    least = min(param.numel() for param in local)
    inside = {param.numel() for param in params if isinstance(param, DTensor)}
    # What `profile.events()` makes of these, parents and children, takes seconds.
    sizes = [
        max(prod(shape) for shape in event.shapes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "gloo:all_reduce"
    ]

    def count(sizes: Sequence[int]) -> int:
        return sum(size >= least and size not in inside for size in sizes)

    return count(sizes) - count(alone)


# What the tests see.


@functools.cache
def hold_sitting(contestant: Contestant, n_workers: int, names: tuple[str, ...]) -> Reports:
    """Do some of the jobs in one set of processes: frameworks are slow to import."""
    world_size = n_workers * contestant.shards
    with tempfile.TemporaryDirectory(prefix="distlion-exam-") as folder:
        jobs = {name: job for name, job in plan_jobs(folder, n_workers).items() if name in names}
        for job in jobs.values():
            os.mkdir(job.folder)
        timeout_s = SECONDS_PER_RANK * world_size + SECONDS_PER_JOB * len(jobs)
        if contestant.launcher is not None:
            _launch(contestant.launcher, world_size, list(jobs.values()), timeout_s)
        else:
            _run(contestant.module, world_size, jobs, timeout_s)
        return {
            name: [_read(job, rank) for rank in range(world_size)] for name, job in jobs.items()
        }


def _run(module: str, world_size: int, jobs: dict[str, Job], timeout_s: float) -> None:
    kills = "killed" in jobs
    outcomes = run_workers(
        sit, world_size, module, list(jobs.values()), timeout_s=timeout_s, may_die=kills
    )
    for rank, outcome in enumerate(outcomes):
        died = isinstance(outcome, WorkerDiedError) and rank == KILLED[0] and kills
        if outcome is not None and not died:
            raise outcome


def _launch(module: str, world_size: int, jobs: list[Job], timeout_s: float) -> None:
    """Let a framework start the ranks; what they say is in their reports."""
    subprocess.run(
        [sys.executable, "-m", module, str(world_size)],
        input=pickle.dumps(jobs),
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        timeout=timeout_s,
        check=False,  # a job kills a rank, which ends the others
    )


def _read(job: Job, rank: int) -> Report:
    path = Path(job.folder) / f"report-{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else Report()


def _finished(reports: Reports, job: str) -> list[Report]:
    """Return the reports of a job that must have come to its end on all ranks."""
    for report in reports[job]:
        assert report.error is None, f"{job}: {report.error}: {report.message}"
        assert report.params, f"{job}: a rank made no report"
    return reports[job]


def _pair(ranks: list[Report], workers: list[Report]) -> list[tuple[Report, Report]]:
    """Put every rank beside the one that stands for its worker."""
    shards, rest = divmod(len(ranks), len(workers))
    assert rest == 0
    return [(ours, workers[rank // shards]) for rank, ours in enumerate(ranks)]


def _has_same_bits(job: str) -> Callable[[Reports, Reports], None]:
    def check(reports: Reports, plain: Reports) -> None:
        workers = _finished(plain, job)
        for ours, theirs in _pair(_finished(reports, job), workers):
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
    assert len({rank.momentum for rank in ranks}) == len(_finished(plain, "straight"))


def _resumes(reports: Reports, plain: Reports) -> None:
    straight, resumed = _finished(reports, "straight"), _finished(reports, "resumed")
    for whole, rest in zip(straight, resumed, strict=True):
        assert rest.steps == whole.steps
        assert rest.losses == whole.losses[SAVED_AT:]
        assert rest.params == whole.params
        assert rest.momentum == whole.momentum


def _clips(reports: Reports, plain: Reports) -> None:
    if len(reports["clipping"]) == len(plain["clipping"]):
        _has_same_bits("clipping")(reports, plain)
        return
    # Shards' norms are added in another order: the last bit of a factor may differ.
    pairs = _pair(_finished(reports, "clipping"), _finished(plain, "clipping"))
    assert len({ours.params for ours, _ in pairs}) == 1
    for ours, theirs in pairs:
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert ours.steps == theirs.steps


def _overlaps(reports: Reports, plain: Reports) -> None:
    for job in ("overlap", "overlap and accumulation"):
        _has_same_bits(job)(reports, plain)


def _evaluates(reports: Reports, plain: Reports) -> None:
    _has_same_bits("evaluation")(reports, plain)
    shards = len(reports["evaluation"]) // len(plain["evaluation"])
    evaluated = sum(report.evaluated for report in reports["evaluation"][::shards])
    assert evaluated == len(VALIDATION) * (STEPS // EVERY)


def _raises_of_nan(reports: Reports, plain: Reports) -> None:
    shards = len(reports["poisoned"]) // len(plain["poisoned"])
    for report in reports["poisoned"]:
        assert report.error is errors.NonFiniteError, report.message
        assert f"step {POISONED[1]}" in report.message
        blamed = range(POISONED[0] * shards, (POISONED[0] + 1) * shards)
        assert f"on rank{'s' * (shards > 1)} {', '.join(map(str, blamed))};" in report.message


def _skips_nan(reports: Reports, plain: Reports) -> None:
    _has_same_bits("skipped")(reports, plain)
    assert {report.steps for report in reports["skipped"]} == {STEPS - 1}


def _ends_with_killed(reports: Reports, plain: Reports) -> None:
    for rank, report in enumerate(reports["killed"]):
        if rank == KILLED[0]:
            assert report == Report(), "the fault did not fire"
        else:
            # Not at the timeout of a step, which has an error of its own.
            assert report.error is errors.PeerLostError, report.message
            assert f"rank {KILLED[0]}" in report.message


ROWS: tuple[Row, ...] = (
    Row("no all-reduce of gradients", ("straight",), _has_no_all_reduce),
    Row("replicas bitwise identical", ("straight",), _has_equal_replicas),
    Row("same bits as a plain loop", ("straight",), _has_same_bits("straight")),
    Row("resumed, with every rank's momentum", ("straight", "resumed"), _resumes),
    Row("gradient accumulation", ("accumulation",), _has_same_bits("accumulation")),
    Row("clipping", ("clipping",), _clips),
    Row("overlap", ("overlap", "overlap and accumulation"), _overlaps),
    Row("evaluation", ("evaluation",), _evaluates),
    Row("NaN on one rank raises on all", ("poisoned",), _raises_of_nan),
    Row("NaN on one rank is skipped by all", ("skipped",), _skips_nan),
    Row("a killed rank ends all", ("killed",), _ends_with_killed),
)
