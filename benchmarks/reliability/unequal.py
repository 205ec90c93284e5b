"""Workers with unequal batches: a majority beside votes that count as often as a batch is large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev

import study_path  # noqa: F401
from cells import SEEDS, Cell
from plan import IMAGES
from protocol import MAJORITY, RATES, WORKERS, Find, compare, score
from runs import RunConfig, Task, Trainer
from schedule import DECAY_PER_STEP
from torch import Tensor, nn

from distlion.virtual import VirtualCluster
from distlion_lab.training.workers import LION_BETAS, VirtualVoting

SIZES = (32, 32, 32, 32, 32, 1, 1, 1)
"""Images of each worker in a step."""
PROPORTIONAL = "proportional"
METHODS = (MAJORITY, PROPORTIONAL)
SETTING = replace(IMAGES, batch=max(SIZES) * len(SIZES))


def list_unequal() -> list[RunConfig]:
    """Return all runs, both methods of a seed before the next seed."""
    cells = [Cell(SETTING, method, WORKERS) for method in METHODS]
    return [cell.config(RATES[None], seed, is_tuning=False) for seed in SEEDS for cell in cells]


def is_unequal(config: RunConfig) -> bool:
    """Return whether a run is one with unequal batches."""
    return config.batch == SETTING.batch


class UnequalTask:
    """A task whose workers use only the first images of their batches, as many as ``SIZES``."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.validate, self.test = task.validate, task.test

    def build_model(self) -> nn.Module:
        """Build the network."""
        return self._task.build_model()

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of each worker."""
        pairs = zip(self._task.batches(step), SIZES, strict=True)
        return [(inputs[:size], targets[:size]) for (inputs, targets), size in pairs]


class UnequalTrainer(Trainer):
    """Train; under PROPORTIONAL a worker's vote counts as often as its batch has images."""

    def __init__(self, config: RunConfig, task: Task, observe: Callable[[int], None]) -> None:
        super().__init__(replace(config, method=MAJORITY), UnequalTask(task), observe)
        self._config = config
        if config.method == PROPORTIONAL:
            named, decay = self._model.named_parameters(), DECAY_PER_STEP / config.lr
            given = {"workers": config.workers, "weight_decay": decay, "seed": config.seed}
            cluster = VirtualCluster(named, config.lr, LION_BETAS, weights=SIZES, **given)
            self._method = VirtualVoting(cluster, rounds=1)


def describe_unequal(find: Find) -> str:
    """Write the table of unequal batches."""
    found = {
        method: [find(run.name) for run in list_unequal() if run.method == method]
        for method in METHODS
    }
    scores = {
        method: [score(record) for record in records if record]
        for method, records in found.items()
        if all(records)
    }
    shown = {method: f"{fmean(each):.1f} ± {stdev(each):.1f}" for method, each in scores.items()}
    complete = len(scores) == len(METHODS)
    verdict = compare(scores[PROPORTIONAL], scores[MAJORITY]) if complete else "open"
    lines = [
        "## Unequal batches",
        "",
        f"Images of each worker in a step: {', '.join(map(str, SIZES))}. Test accuracy in %.",
        "",
        "| each vote counts once | as often as its batch has images | beside the first |",
        "|---:|---:|---|",
        f"| {shown.get(MAJORITY, '')} | {shown.get(PROPORTIONAL, '')} | {verdict} |",
    ]
    return "\n".join([*lines, ""])
