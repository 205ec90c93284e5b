"""The option that leaves out workers who disagree, beside the majority of the same seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import study_path  # noqa: F401
from protocol import (
    CONDITIONS,
    MAJORITY,
    Find,
    decide,
    find_all,
    judge,
    list_runs,
    name_condition,
    score,
)
from runs import RunConfig, Task, Trainer
from schedule import DECAY_PER_STEP

from distlion import Agreement
from distlion.virtual import VirtualCluster
from distlion_lab.training.workers import LION_BETAS, VirtualVoting

EXCLUDING = "excluding"
EVERY = 10


def list_option() -> list[RunConfig]:
    """Return all runs, all conditions of a seed before the next seed."""
    by_seed = zip(*(list_runs(EXCLUDING, each) for each in CONDITIONS), strict=True)
    return [run for runs in by_seed for run in runs]


class ExcludingTrainer(Trainer):
    """Train by ``on_disagreement="exclude"``; the record has each worker's excluded share."""

    def __init__(self, config: RunConfig, task: Task, observe: Callable[[int], None]) -> None:
        super().__init__(replace(config, method=MAJORITY), task, observe)
        self._config = config
        self._cluster = VirtualCluster(
            self._model.named_parameters(),
            config.lr,
            LION_BETAS,
            workers=config.workers,
            weight_decay=DECAY_PER_STEP / config.lr,
            agreement=Agreement(every=EVERY, on_disagreement="exclude"),
            seed=config.seed,
        )
        self._method = VirtualVoting(self._cluster, rounds=1)

    def run(self) -> dict[str, Any]:
        """Return the record."""
        record, workers = super().run(), range(self._config.workers)
        found = self._cluster.diagnostics()
        shares = [fmean(worker in each.excluded for each in found) for worker in workers]
        return {**record, "excluded": shares}


def decide_option(find: Find) -> str:
    """Return "ship" where a method of weights would be built, else "reject" or "open"."""
    return decide(find, EXCLUDING).replace("build", "ship")


def describe_option(find: Find) -> str:
    """Write the table of the option."""
    lines = [
        "## The option",
        "",
        '`on_disagreement="exclude"`, looks every 10 steps. Test accuracy in %, and the share of',
        "looks at which votes of a worker did not count: flippers, and the honest worker that was",
        "left out most.",
        "",
        "| data | majority | option | flippers left out | honest, at most |",
        "|---|---:|---:|---:|---:|",
    ]
    for condition in CONDITIONS:
        flippers, own = condition[1], find_all(find, EXCLUDING, condition)
        if not own:
            lines.append(f"| {name_condition(condition)} | open | open | open | open |")
            continue
        cells = [_show(find_all(find, MAJORITY, condition))]
        cells.append(f"{_show(own)}, {judge(find, EXCLUDING, condition)}")
        gone = [share for each in own for share in each["excluded"][:flippers]]
        cells.append(f"{100 * fmean(gone):.0f} %" if gone else "")
        cells.append(f"{100 * max(s for each in own for s in each['excluded'][flippers:]):.0f} %")
        lines.append(f"| {name_condition(condition)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Decided: {decide_option(find)}.", ""])


def _show(records: list[dict[str, Any]]) -> str:
    found = [score(record) for record in records]
    return f"{fmean(found):.1f} ± {stdev(found):.1f}" if found else "open"
