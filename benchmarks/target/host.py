"""What runs on each host of the lab: methods that take turns, or one whole run.

    python host.py JOB

JOB is a ``Job`` as JSON; rank 0 writes what it found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import study_path  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from archive import describe_place
from curves import Data
from runs import RunConfig, Task, digest_parameters
from schedule import DECAY_PER_STEP, rate_factor
from settings import FLOOR, HOSTS, METHODS, TIMED, make_cell
from torch import nn

from distlion.optim import DistributedLion
from distlion.votes import RULES
from distlion_netlab.lab_run import average_gradients

# PowerSGD compresses from its third step on, and DDP cuts its buckets anew in the second.
_WARM_UP_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all hosts do together.

    Attributes:
        task: ``images`` or ``text``.
        folder: Of its data.
        out: File that rank 0 writes.
        repetitions, block_steps: Of each method while steps are timed.
        method: Of a whole run; "" times steps.
        lr, seed: Of a whole run.
    """

    task: str
    folder: str
    out: str
    repetitions: int = 10
    block_steps: int = 5
    method: str = ""
    lr: float = 0.0
    seed: int = 0

    def config(self, method: str) -> RunConfig:
        """Return a run of a method, as virtual workers would do it; any rate will do for timing."""
        cell = make_cell(self.task, "global-adamw" if method == FLOOR else method)
        lr = self.lr if self.method else cell.center
        return replace(cell.config(lr, self.seed, is_tuning=False), workers=HOSTS)

    def build_task(self, config: RunConfig) -> Task:
        """Return what a run trains on."""
        folder = Path(self.folder)
        is_images = self.task == "images"
        data = Data(folder, None) if is_images else Data(None, folder)
        return data.build(config)[0]


class Worker:
    """One of the workers of a method, in this process.

    Args:
        config: The run.
        task: What it trains on.
        method: As in ``METHODS``, or ``none``.
    """

    def __init__(self, config: RunConfig, task: Task, method: str) -> None:
        self._config, self._task = config, task
        self.model = task.build_model()
        self._wrapped, self._optimizer = build_optimizer(config, self.model, method)
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


def build_optimizer(
    config: RunConfig, model: nn.Module, method: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return what is called for a forward pass, and the optimizer."""
    decay = DECAY_PER_STEP / config.lr
    if method == FLOOR:
        return model, torch.optim.AdamW(model.parameters(), config.lr, weight_decay=decay)
    settings = METHODS[method]
    if settings.rule is not None:
        voting = DistributedLion(
            model.named_parameters(),
            config.lr,
            settings.betas,
            weight_decay=decay,
            aggregation=RULES[settings.rule].rule,
            seed=config.seed,
        )
        return model, voting
    adamw = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=decay)
    return average_gradients(model, settings.ddp, seed=config.seed), adamw


def time_steps(job: Job) -> dict[str, Any]:
    """Return for each method the seconds of a step, a value for each of its blocks."""
    task = job.build_task(job.config(FLOOR))
    names = (FLOOR, *TIMED)
    workers = {name: Worker(job.config(name), task, name) for name in names}
    for worker in workers.values():
        run_block(worker, _WARM_UP_STEPS)
    blocks: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(job.repetitions):
        # Another method begins in each repetition.
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            blocks[name].append(run_block(workers[name], job.block_steps))
    return {"block_steps": job.block_steps, "seconds": blocks}


def run_block(worker: Worker, steps: int) -> float:
    """Return the seconds of a step on the slowest worker."""
    return time_slowest(worker.step, steps)


def time_slowest(call: Callable[[], None], times: int) -> float:
    """Return the seconds of one of several calls on the slowest worker."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        call()
    longest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return round(float(longest) / times, 6)


def train_whole(job: Job) -> dict[str, Any]:
    """Train from the first step to the last; the clock stands still while test data is scored."""
    config = job.config(job.method)
    task = job.build_task(config)
    worker = Worker(config, task, job.method)
    marks = [
        round(config.steps * (place + 1) / config.evaluations)
        for place in range(config.evaluations)
    ]
    curve = _follow(worker, marks, lambda: _score(task, worker.model))
    return {
        "config": asdict(config),
        "test_curve": curve,
        "parameters_sha256": digest_parameters(worker.model),
    }


def _follow(
    worker: Worker, marks: list[int], score: Callable[[], list[float]]
) -> list[list[float]]:
    seconds = 0.0
    curve = []
    dist.barrier()
    started = time.perf_counter()
    for done in count(1):
        worker.step()
        if done not in marks:
            continue
        seconds += time.perf_counter() - started
        if dist.get_rank() == 0:
            curve.append([done, round(seconds, 4), *score()])
        if done == marks[-1]:
            return curve
        dist.barrier()
        started = time.perf_counter()
    raise AssertionError("counting does not end")


def _score(task: Task, model: nn.Module) -> list[float]:
    result = task.test(model)
    return [round(result.loss, 6), round(result.accuracy, 6)]


def report_together(find: Callable[[], dict[str, Any]], out: str) -> None:
    """Join the other hosts and do a job with them; rank 0 writes what it found. Ends the process.

    Args:
        find: The job.
        out: The file.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = find()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({**describe_place(), **found}))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of Gloo may still hold a tensor, which can abort an interpreter that shuts down.
    os._exit(0)


def main() -> None:
    """Join the others and do the job."""
    job = Job(**json.loads(sys.argv[1]))
    report_together(lambda: train_whole(job) if job.method else time_steps(job), job.out)


if __name__ == "__main__":
    main()
