"""Seconds and bytes until a loss is reached, out of the records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import target_path  # noqa: F401
from archive import Records
from cells import SEEDS, Choice, Find, choose_rate
from contest import (
    DDP,
    DDP_FP16,
    LONGER,
    MAJORITY,
    ONE_BIT,
    POWERSGD,
    POWERSGD_4,
    SETTINGS,
    SHORT,
    ContestCell,
    lengthen,
    make_cell,
    read_local,
)
from contestants import HALF, LOW_RANK, LOW_RANK_4, MEAN, SIGNS, SPARSE, VOTE
from crossing import Curve, cross
from lab_host import COMPUTE
from schedule import WARM_UP_SHARE

from distlion_lab.baselines.power_sgd import PowerSGD

SHARES = (0.5, 0.8, 1.0)
"""Of DDP's steps, after which its loss is the target."""
_EXCHANGES = {
    DDP: MEAN,
    DDP_FP16: HALF,
    POWERSGD: LOW_RANK,
    POWERSGD_4: LOW_RANK_4,
    ONE_BIT: SIGNS,
    MAJORITY: VOTE,
    SHORT: VOTE,
}
_OF_OTHERS = {"diloco": MEAN, "diloco-plain": MEAN, "sparse": SPARSE}
_TITLES = {
    DDP: "DDP, fp32 + AdamW",
    DDP_FP16: "DDP, fp16 + AdamW",
    POWERSGD: "PowerSGD of rank 1 + AdamW",
    POWERSGD_4: "PowerSGD of rank 4 + AdamW",
    ONE_BIT: "1-bit Adam",
    MAJORITY: "majority vote in each step",
    SHORT: "majority vote in each step, betas (0.9, 0.95)",
}
_DRAWN_AS = {
    DDP_FP16: "DDP, fp16",
    ONE_BIT: "1-bit Adam",
    SHORT: "a vote in each step",
    "diloco-8-plain": "DiLoCo: means every 8 steps of AdamW",
    "local-8-scaled-plain": "votes every 8 steps of AdamW",
}
"""Methods of the picture, which is for readers who do not know the names of records."""
INNER_SECONDS = "seconds_inner_text.json"
"""File of the seconds of steps with each inner optimizer."""
_WHOLE_BITS = 2 * 32
"""Of an element, up and down in a warm-up."""
Blocks = Mapping[str, Sequence[float]]
"""Seconds of computing and of each exchange on one link, by repetition."""


def read_seconds(folder: Path, task: str) -> dict[str, Any] | None:
    """Return the record of what was timed for a task; None if nothing was."""
    path = folder / f"seconds_{task}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def read_inner_seconds(folder: Path) -> dict[str, Any] | None:
    """Return the record of steps with each inner optimizer on text; None if it is not there."""
    path = folder / INNER_SECONDS
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def name_compute(inner: str) -> str:
    """Return the name of the seconds of computing with an inner optimizer."""
    return f"{COMPUTE} over {inner}" if inner else COMPUTE


def read_blocks(folder: Path, task: str, link: str) -> Blocks:
    """Return what was timed for a task on a link; nothing if it was not.

    Computing with an inner optimizer other than AdamW takes as many times as long as AdamW's as it
    does where both were timed in turns.
    """
    found, inner = read_seconds(folder, task), read_inner_seconds(folder)
    blocks: dict[str, Sequence[float]] = (
        {} if found is None else dict(found["seconds"].get(link, {}))
    )
    if COMPUTE not in blocks or inner is None or task != "text":
        return blocks
    adamw = median(inner["seconds"][name_compute("")])
    for name, seconds in inner["seconds"].items():
        if name != COMPUTE:
            blocks[name] = [median(blocks[COMPUTE]) * median(seconds) / adamw]
    return blocks


def name_exchange(method: str) -> str:
    """Return what is timed for the exchange of a method."""
    local = read_local(method)
    if local is None:
        return _EXCHANGES[method]
    if local.kind in _OF_OTHERS:
        return _OF_OTHERS[local.kind]
    return local.kind.rpartition("-")[0]


@dataclass(frozen=True)
class Slope:
    """A sum that grows with steps: evenly in a warm-up, and evenly after it.

    Attributes:
        each: Growth in a step after the warm-up.
        warm_up_each: Growth in a step of the warm-up.
        warm_up: First steps that send 32 bits, of 1-bit Adam and PowerSGD; 0 for others.
    """

    each: float
    warm_up_each: float = 0.0
    warm_up: int = 0

    def at(self, step: float) -> float:
        """Return the sum of the first steps."""
        warm = min(step, self.warm_up)
        return warm * self.warm_up_each + (step - warm) * self.each

    def step_at(self, total: float) -> float:
        """Return the steps whose sum it is, the inverse of ``at``."""
        before = self.at(self.warm_up)
        if total < before:
            return total / self.warm_up_each
        return self.warm_up + (total - before) / self.each


@dataclass(frozen=True)
class Pace:
    """Seconds of a method's steps on a link.

    Attributes:
        compute_s: c, of each step.
        exchange_s: e, of each exchange after the warm-up.
        warm_up_s: e of the first steps, which send 32 bits.
        warm_up: Steps of that warm-up; 0 for others.
        every: Steps from exchange to exchange.
        hides: Whether the exchange hides behind the computing of its step.
    """

    compute_s: float
    exchange_s: float
    warm_up_s: float = 0.0
    warm_up: int = 0
    every: int = 1
    hides: bool = False

    @property
    def _slope(self) -> Slope:
        if self.hides:
            return Slope(max(self.compute_s, self.exchange_s))
        rest_s = self.compute_s + self.exchange_s / self.every
        return Slope(rest_s, self.compute_s + self.warm_up_s, self.warm_up)

    def seconds(self, step: float) -> float:
        """Return the seconds of the first steps; a part of a period pays a part of its exchange."""
        return self._slope.at(step)

    def step_at(self, seconds: float) -> float:
        """Return the steps that fit in so many seconds, the inverse of ``seconds``."""
        return self._slope.step_at(seconds)


def _count_warm_up(method: str, steps: int) -> int:
    """Return the first steps of a run that send 32 bits, of 1-bit Adam and PowerSGD."""
    if method == ONE_BIT:
        return max(1, round(WARM_UP_SHARE * steps))
    return PowerSGD().start_step if method in (POWERSGD, POWERSGD_4) else 0


def find_pace(method: str, steps: int, blocks: Blocks, *, hides: bool = False) -> Pace | None:
    """Return the seconds of a method that runs so many steps; None where they were not timed.

    Args:
        method: Name.
        steps: Of the whole run.
        blocks: What was timed on a link.
        hides: Whether DDP's exchange hides behind its backward pass; those of others never do.
    """
    name, local = name_exchange(method), read_local(method)
    compute = name_compute("" if local is None else local.inner)
    if name not in blocks or compute not in blocks:
        return None
    compute_s, exchange_s = median(blocks[compute]), median(blocks[name])
    if warm_up := _count_warm_up(method, steps):
        return Pace(compute_s, exchange_s, median(blocks[MEAN]), warm_up)
    every = 1 if local is None else local.every
    return Pace(compute_s, exchange_s, every=every, hides=hides and method == DDP)


def loss_at(curve: Curve, step: float) -> float | None:
    """Return the loss at a step, on straight lines; the last after the end; None before a score."""
    if step < curve[0][0]:
        return None
    for (begin, before, _), (end, after, _) in pairwise(curve):
        if step < end:
            return before + (after - before) * (step - begin) / (end - begin)
    return float(curve[-1][1])


@dataclass(frozen=True)
class Entry:
    """A method at one length, with what has been recorded of it.

    Attributes:
        cell: Which one.
        choice: Its tuning.
        records: Of its reported runs, by seed.
    """

    cell: ContestCell
    choice: Choice
    records: Mapping[int, Mapping[str, Any]]

    @classmethod
    def read(cls, cell: ContestCell, find: Find) -> Entry:
        """Look for the records of a cell."""
        choice = choose_rate(cell, find)
        found = {}
        for seed in SEEDS if choice.rate is not None else ():
            assert choice.rate is not None
            record = find(cell.config(choice.rate, seed, is_tuning=False).name)
            if record is not None:
                found[seed] = record
        return cls(cell, choice, found)

    @property
    def method(self) -> str:
        """Its name."""
        return self.cell.method

    @property
    def title(self) -> str:
        """Its name in reports."""
        title = _TITLES.get(self.method, self.method)
        return f"{title}, {LONGER} x the steps" if self.cell.is_long else title

    @property
    def drawn_as(self) -> str:
        """Its name in the picture; empty for those that are in the tables only."""
        is_longer = self.method in _DRAWN_AS and self.cell.is_long
        return _DRAWN_AS.get(self.method, "") + f", {LONGER} times the steps" * is_longer

    @property
    def is_whole(self) -> bool:
        """True if all seeds are there."""
        return len(self.records) == len(SEEDS)

    @property
    def curves(self) -> dict[int, Curve]:
        """Curves of test data of the seeds that came to their end."""
        found = {seed: each for seed, each in self.records.items() if not each["diverged"]}
        return {seed: each["test_curve"] for seed, each in found.items()}

    @property
    def traffic(self) -> Slope | None:
        """Its megabytes; None before a run.

        Records have the mean of a run. A warm-up sends 32 bits each way, and the rest is spread
        evenly over the later steps.
        """
        ended = [each for each in self.records.values() if not each["diverged"]]
        if not ended:
            return None
        megabytes_of_bit = ended[0]["parameters"] / 8e6
        mean_mb = (ended[0]["bits_up"] + ended[0]["bits_down"]) * megabytes_of_bit
        steps = self.cell.setting.steps
        warm_up = _count_warm_up(self.method, steps)
        warm_up_mb = _WHOLE_BITS * megabytes_of_bit
        rest_mb = (steps * mean_mb - warm_up * warm_up_mb) / (steps - warm_up)
        return Slope(rest_mb, warm_up_mb, warm_up)

    def steps_to(self, targets: Mapping[int, float]) -> dict[int, float]:
        """Return the steps in which each seed reaches its target, infinite where it does not."""
        found = {}
        for seed in SEEDS:
            curve = self.curves.get(seed)
            step = None if curve is None else cross(curve, "text", targets[seed])
            found[seed] = math.inf if step is None else step
        return found

    def seconds_to(
        self, targets: Mapping[int, float], blocks: Blocks, *, hides: bool = False
    ) -> dict[int, float] | None:
        """Return seconds to the targets by seed; None before all is run and timed."""
        pace = find_pace(self.method, self.cell.setting.steps, blocks, hides=hides)
        if pace is None or not self.is_whole:
            return None
        steps = self.steps_to(targets)
        return {seed: pace.seconds(n) if math.isfinite(n) else n for seed, n in steps.items()}

    def mean_loss(self, step: float) -> float | None:
        """Return the mean loss of all seeds at a step; None without one."""
        losses = [loss_at(curve, step) for curve in self.curves.values()]
        known = [loss for loss in losses if loss is not None]
        return fmean(known) if known and len(known) == len(SEEDS) else None


def find_targets(task: str, find: Find) -> dict[float, dict[int, float]]:
    """Return for each share of DDP's steps the loss of each of its seeds; nothing before."""
    entry = Entry.read(make_cell(task, DDP), find)
    if len(entry.curves) < len(SEEDS):
        return {}
    steps = SETTINGS[task].steps
    found = {}
    for share in SHARES:
        losses = {seed: loss_at(curve, share * steps) for seed, curve in entry.curves.items()}
        found[share] = {seed: loss for seed, loss in losses.items() if loss is not None}
    return found


def read_lengths(cell: ContestCell, find: Find) -> list[Entry]:
    """Return a method at DDP's length, and at the longer one if it has been run."""
    found = [Entry.read(cell, find)]
    longer = Entry.read(lengthen(cell), find)
    return [*found, longer] if longer.records else found


def read_all(records: Records, cells: Sequence[ContestCell]) -> list[Entry]:
    """Return the entries of cells in order, at both lengths."""
    return [entry for cell in cells for entry in read_lengths(cell, records.read)]
