"""A run that notes how far each worker agreed with the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import fmean
from typing import Any

import study_path  # noqa: F401
from protocol import MAJORITY
from runs import RunConfig, Task, Trainer
from schedule import DECAY_PER_STEP
from weighed_votes import WeighedVotes

from distlion import Agreement
from distlion.errors import DisagreeingWorkersWarning
from distlion.virtual import VirtualCluster
from distlion_lab.training.workers import LION_BETAS, VirtualVoting


class WatchedTrainer(Trainer):
    """Train; a majority is diagnosed every 10 steps, which changes no bit of it."""

    def __init__(self, config: RunConfig, task: Task, observe: Callable[[int], None]) -> None:
        super().__init__(config, task, observe)
        if config.method == MAJORITY:
            decay, named = DECAY_PER_STEP / config.lr, self._model.named_parameters()
            given = {"workers": config.workers, "weight_decay": decay, "seed": config.seed}
            cluster = VirtualCluster(
                named, config.lr, LION_BETAS, agreement=Agreement(every=10), **given
            )
            self._method = VirtualVoting(cluster, rounds=1)

    def run(self) -> dict[str, Any]:
        """Return the record: with the workers that were named, and each worker's agreement."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            record = super().run()
        method, found = self._method, [each.message for each in seen]
        named = [each.workers for each in found if isinstance(each, DisagreeingWorkersWarning)]
        record["named"] = [worker for each in named for worker in each]
        if isinstance(method, WeighedVotes):
            weights = method.weights.tolist()
            return {**record, "agreement": method.agreement.tolist(), "weights": weights}
        rows = [each.agreement_of for each in method.optimizer.diagnostics()]
        shares = [[s for s in row if s is not None] for row in zip(*rows, strict=True)]
        return {**record, "agreement": [fmean(row) for row in shares]}
