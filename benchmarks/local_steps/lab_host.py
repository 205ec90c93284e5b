"""The program of each host of the lab: compute and exchange in turns, or train a whole run.

    python lab_host.py JOB

JOB is a ``Job`` as JSON; rank 0 writes what it found.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import target_path  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contest import DDP, MAJORITY, SHORT, WORKERS, make_cell, read_local
from contestants import Contestant, make_contestants
from curves import Data
from diloco import DiLoCo
from host import report_together, time_slowest
from runs import RunConfig, Task, digest_parameters
from schedule import DECAY_PER_STEP, rate_factor
from torch import nn

import distlion
from distlion.wire import AllReduce
from distlion_lab.training.periodic import read_local_votes
from distlion_netlab.lab_run import average_gradients
from distlion_netlab.method_names import DDP_FP32

COMPUTE = "compute"
_COMPUTE_STEPS = 4
# PowerSGD compresses from its third exchange on, and DDP cuts its buckets anew in the second.
_WARM_UP_TURNS = 4
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """Work that all hosts share.

    Attributes:
        task: ``images`` or ``text``.
        folder: Of its data.
        out: File that rank 0 writes.
        links: Rates at which exchanges are timed, one after the other.
        repetitions: Of each contestant.
        run: Settings of a whole run; None times contestants.
        place: Folder in which rank 0 asks for another rate.
    """

    task: str
    folder: str
    out: str
    links: tuple[str, ...] = ()
    repetitions: int = 8
    run: dict[str, Any] | None = None
    place: str = ""

    def build_task(self, config: RunConfig) -> Task:
        """Return what a run trains on."""
        folder = Path(self.folder)
        data = Data(folder, None) if self.task == "images" else Data(None, folder)
        return data.build(config)[0]


def ask_for_rate(place: Path, rate: str) -> None:
    """Let the program that owns the lab change the rate of all links, and wait until it has."""
    (place / "wanted").write_text(rate)
    while not (place / "set").exists() or (place / "set").read_text() != rate:
        time.sleep(_POLL_S)


class Stepper(Protocol):
    """An optimizer of one worker."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups, with their rates."""
        ...

    def step(self) -> Any:
        """Take a step."""
        ...

    def zero_grad(self) -> None:
        """Forget all gradients."""
        ...


class Worker:
    """One worker of a run, in this process.

    Args:
        config: The run, of ``WORKERS`` workers.
        task: What it trains on.
        optimizer: Steps on this worker's gradients.
        wrapped: What is called for a forward pass.
    """

    def __init__(
        self, config: RunConfig, task: Task, optimizer: Stepper, wrapped: nn.Module
    ) -> None:
        self._config, self._task = config, task
        self._optimizer, self._wrapped = optimizer, wrapped
        self.done = 0

    def step(self) -> None:
        """Do one step with this worker's share of the examples."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * rate_factor(self.done, self._config.steps)
        inputs, targets = self._task.batches(self.done)[dist.get_rank()]
        logits = self._wrapped(inputs).flatten(0, -2)
        F.cross_entropy(logits, targets.flatten()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1


def build_worker(config: RunConfig, task: Task, model: nn.Module) -> Worker:
    """Build the worker of a method: DDP, a vote in each step, or local steps with votes."""
    decay = DECAY_PER_STEP / config.lr
    params = list(model.parameters())
    if config.method in (MAJORITY, SHORT):
        betas = (0.9, 0.95) if config.method == SHORT else (0.9, 0.99)
        voting = distlion.DistributedLion(
            params, config.lr, betas, weight_decay=decay, exchange=AllReduce(), seed=config.seed
        )
        return Worker(config, task, voting, model)
    adamw = torch.optim.AdamW(params, config.lr, weight_decay=decay)
    if config.method == DDP:
        return Worker(config, task, adamw, average_gradients(model, DDP_FP32, seed=config.seed))
    local = read_local(config.method)
    if local is not None and local.inner:
        sys.exit(f"no whole run of {config.method}: expected AdamW inside")
    if local is not None and local.kind.startswith("diloco"):
        is_plain = local.kind == "diloco-plain"
        return Worker(config, task, DiLoCo(adamw, every=local.every, is_plain=is_plain), model)
    votes = read_local_votes(config.method)
    if votes is None:
        sys.exit(f"no whole run of {config.method}: expected DDP, votes or DiLoCo")
    voting = distlion.LocalSteps(
        adamw,
        every=votes.every,
        aggregation=votes.rule,
        exchange=AllReduce(),
        seed=config.seed,
        **votes.outer.options,
    )
    return Worker(config, task, voting, model)


def time_contestants(job: Job) -> dict[str, Any]:
    """Return the seconds of computing and of each exchange at each rate, by repetition."""
    cell = make_cell(job.task, DDP)
    config = RunConfig(**asdict(cell.config(cell.center, 0, is_tuning=True)) | {"workers": WORKERS})
    task = job.build_task(config)
    model = task.build_model()
    adamw = torch.optim.AdamW(model.parameters(), config.lr)
    alone = Worker(config, task, adamw, model)
    contestants = make_contestants(list(model.parameters()))
    return asdict(time_links(job, alone.step, contestants))


@dataclass(frozen=True)
class Timed:
    """Seconds by link and name, of each repetition.

    Attributes:
        seconds: Of computing and of exchanges, on the slowest worker.
        cpu_seconds: Of exchanges, those of the process of rank 0 on a core.
    """

    seconds: dict[str, dict[str, list[float]]]
    cpu_seconds: dict[str, dict[str, list[float]]]


def time_links(
    job: Job, step_alone: Callable[[], None], contestants: dict[str, Contestant]
) -> Timed:
    """Time all of them at each rate of a job, after a warm-up without any limit."""
    turns = {name: Turn(contestant) for name, contestant in contestants.items()}
    for turn in turns.values():
        for _ in range(_WARM_UP_TURNS):
            turn()
    found = Timed({}, {})
    for link in job.links:
        if dist.get_rank() == 0:
            ask_for_rate(Path(job.place), link)
        dist.barrier()
        found.seconds[link], found.cpu_seconds[link] = take_turns(
            step_alone, turns, job.repetitions
        )
        if dist.get_rank() == 0:
            print(f"{job.task}: timed at {link}", file=sys.stderr, flush=True)
    return found


def take_turns(
    step_alone: Callable[[], None], turns: dict[str, Turn], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time all of them after one turn that does not count; another begins each repetition.

    Returns:
        Seconds on the slowest worker, and seconds of this process on a core.
    """
    calls: dict[str, Callable[[], float]] = {COMPUTE: lambda: _time_alone(step_alone)}
    calls |= turns
    names = [*calls]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in turns}
    for name in names:
        calls[name]()
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(calls[name]())
            if name in turns:
                cpu_seconds[name].append(turns[name].cpu_s)
    return seconds, cpu_seconds


def _time_alone(step: Callable[[], None]) -> float:
    """Return the seconds of a step of rank 0 while all others wait."""
    dist.barrier()
    started = time.perf_counter()
    if dist.get_rank() == 0:
        for _ in range(_COMPUTE_STEPS):
            step()
    seconds = time.perf_counter() - started
    dist.barrier()
    return round(seconds / _COMPUTE_STEPS, 6)


class Turn:
    """An exchange that is timed.

    Args:
        contestant: Exchanges.

    Attributes:
        cpu_s: Seconds of this process on a core during the last exchange.
    """

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self.cpu_s = 0.0

    def __call__(self) -> float:
        """Return the seconds of an exchange on the slowest worker."""
        self._contestant.prepare()
        return time_slowest(self._exchange, 1)

    def _exchange(self) -> None:
        started = time.process_time()
        self._contestant.exchange()
        self.cpu_s = round(time.process_time() - started, 6)


def train_whole(job: Job) -> dict[str, Any]:
    """Train from the first step to the last; the clock stands still while test data is scored."""
    assert job.run is not None
    config = RunConfig(**job.run)
    task = job.build_task(config)
    model = task.build_model()
    worker = build_worker(config, task, model)
    if dist.get_rank() == 0:
        ask_for_rate(Path(job.place), job.links[0])
    every = config.steps // config.evaluations
    curve, seconds = [], 0.0
    while worker.done < config.steps:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(every):
            worker.step()
        seconds += time.perf_counter() - started
        if dist.get_rank() == 0:
            result = task.test(model)
            curve.append([worker.done, round(seconds, 4), round(result.loss, 6)])
            print(f"  {worker.done}/{config.steps}", file=sys.stderr, flush=True)
    return {
        "config": asdict(config),
        "test_curve": curve,
        "parameters_sha256": digest_parameters(model),
    }


def main() -> None:
    """Join the others and do the job."""
    given = json.loads(sys.argv[1])
    job = Job(**given | {"links": tuple(given["links"])})
    report_together(lambda: train_whole(job) if job.run else time_contestants(job), job.out)


if __name__ == "__main__":
    main()
