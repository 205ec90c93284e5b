"""What runs on each host of the lab: local steps, exchanges and whole steps that take turns.

    python local_host.py JOB

JOB is a ``Job`` as JSON; rank 0 writes what it found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import target_path  # noqa: F401
import torch
import torch.distributed as dist
from curves import Data
from design import DDP, EXCHANGE, MAJORITY, PERIOD, PERIODS, WAYS, WORKERS, make_cell
from host import Worker, report_together, time_slowest
from runs import RunConfig, Task
from settings import FLOOR
from torch import Tensor, nn

from distlion import Replicas
from distlion.optim import DistributedLion
from distlion_lab.training.inner import OUTER_LR, OUTER_MOMENTUM

# DDP cuts its buckets anew in its second step.
_WARM_UP_STEPS = 3
# Steps of a block; exchanges and periods come one at a time.
_BLOCK_STEPS = {FLOOR: 4, MAJORITY: 4, DDP: 1}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all hosts do together.

    Attributes:
        books: Their folder.
        out: File that rank 0 writes.
        repetitions: Blocks of each contestant.
    """

    books: str
    out: str
    repetitions: int


class LocalWorker:
    """A worker with local steps, in this process.

    Args:
        config: The run.
        task: What it trains on.
        make_agreement: Builds over the anchor what turns deltas into what all workers step on.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        make_agreement: Callable[[list[nn.Parameter]], Callable[[list[Tensor]], list[Tensor]]],
    ) -> None:
        self._worker = Worker(config, task, FLOOR)
        self._params = list(self._worker.model.parameters())
        self._anchor = [nn.Parameter(param.detach().clone()) for param in self._params]
        # The dearer of the two outer steps.
        self._outer = torch.optim.SGD(
            self._anchor, OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True
        )
        self._agree = make_agreement(self._anchor)

    def step(self) -> None:
        """Do a local step."""
        self._worker.step()

    @torch.no_grad()
    def exchange(self) -> None:
        """Agree on the deltas, step, and begin anew from the anchor."""
        deltas = [a - p for a, p in zip(self._anchor, self._params, strict=True)]
        for anchor, outcome in zip(self._anchor, self._agree(deltas), strict=True):
            anchor.grad = outcome
        self._outer.step()
        for anchor, param in zip(self._anchor, self._params, strict=True):
            param.copy_(anchor)

    def run_period(self) -> None:
        """Do local steps and their exchange."""
        for _ in range(PERIODS[0]):
            self.step()
        self.exchange()


def agree_by_mean(anchor: list[nn.Parameter]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return what averages deltas, in one all-reduce."""
    sizes = [param.numel() for param in anchor]

    def agree(deltas: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([delta.flatten() for delta in deltas])
        dist.all_reduce(flat)
        parts = flat.div_(dist.get_world_size()).split(sizes)
        return [part.view_as(delta) for part, delta in zip(parts, deltas, strict=True)]

    return agree


def agree_by_votes(anchor: list[nn.Parameter]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return what votes on deltas, and scales the outcomes by their mean magnitudes.

    The votes are those of ``DistributedLion`` without momenta, on parameters that stand in for the
    anchor: they begin at 0 with a rate of 1 and end at minus the outcome.
    """
    outcomes = [nn.Parameter(torch.zeros_like(param)) for param in anchor]
    voting = DistributedLion(outcomes, 1.0, (0.0, 0.0), replicas=Replicas(check_every=None))

    def agree(deltas: list[Tensor]) -> list[Tensor]:
        scales = torch.stack([delta.abs().mean() for delta in deltas])
        dist.all_reduce(scales)
        for outcome, delta in zip(outcomes, deltas, strict=True):
            outcome.zero_()
            outcome.grad = delta
        voting.step()
        scales /= dist.get_world_size()
        return [outcome * -scale for outcome, scale in zip(outcomes, scales, strict=True)]

    return agree


def time_contestants(job: Job) -> dict[str, Any]:
    """Return the seconds of steps, exchanges and periods, a value for each block."""
    configs = {name: _make_config(name) for name in (FLOOR, DDP, MAJORITY)}
    task = Data(None, Path(job.books)).build(configs[FLOOR])[0]
    workers = {name: Worker(config, task, name) for name, config in configs.items()}
    agreements = dict(zip(WAYS.values(), (agree_by_votes, agree_by_mean), strict=True))
    local = {
        what: LocalWorker(configs[FLOOR], task, agreement) for what, agreement in agreements.items()
    }
    turns = {name: _time_steps(worker, _BLOCK_STEPS[name]) for name, worker in workers.items()}
    turns |= {EXCHANGE.format(what): _time_exchange(worker) for what, worker in local.items()}
    turns |= {PERIOD.format(what): _time_period(worker) for what, worker in local.items()}
    for worker in (*workers.values(), *local.values()):
        time_slowest(worker.step, _WARM_UP_STEPS)
    for worker in local.values():
        worker.exchange()
    return {"seconds": _take_turns(turns, job.repetitions)}


def _make_config(name: str) -> RunConfig:
    """Return a run with the protocol's batch on each host; any rate will do for timing."""
    cell = make_cell(DDP if name == FLOOR else name)
    return replace(cell.config(cell.center, 0, is_tuning=True), workers=WORKERS)


def _time_steps(worker: Worker, steps: int) -> Callable[[], float]:
    return lambda: time_slowest(worker.step, steps)


def _time_exchange(worker: LocalWorker) -> Callable[[], float]:
    def turn() -> float:
        worker.step()  # so that there is something to agree on
        return time_slowest(worker.exchange, 1)

    return turn


def _time_period(worker: LocalWorker) -> Callable[[], float]:
    return lambda: time_slowest(worker.run_period, 1)


def _take_turns(turns: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Let another one begin in each repetition."""
    names = [*turns]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(turns[name]())
    return seconds


def main() -> None:
    """Join the others and do the job."""
    job = Job(**json.loads(sys.argv[1]))
    report_together(lambda: time_contestants(job), job.out)


if __name__ == "__main__":
    main()
