"""What is trained, by which methods, at which rates and until when: the protocol as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import study_path  # noqa: F401
from cells import SEEDS, Cell, Find, Setting, choose_rate
from runs import RunConfig

from distlion_lab.training.workers import LION_BETAS
from distlion_netlab.method_names import DDP_FP16, DDP_FP32, DDP_POWERSGD

HOSTS = 4
LINKS = ("100mbit", "1gbit")
# Of a reported run, in which the test data is scored so many times with the clock stopped.
EVALUATIONS = 10
IMAGES = Setting("images", 320, 64, EVALUATIONS, {"width": 48, "groups": 2, "shrink": 2})
TEXT = Setting("text", 400, 16, EVALUATIONS, {"width": 160, "layers": 3, "heads": 4, "context": 64})
SETTINGS = {"images": IMAGES, "text": TEXT}
# Every so many images and windows of the study's are scored.
THINNED = {"images": 2, "text": 16}


@dataclass(frozen=True)
class Method:
    """A method of the benchmark: virtual workers know it by its name, the lab by the rest.

    Attributes:
        title: For reports.
        color: Of its curve.
        center: The middle of the rates that are tried first, for each task.
        rule: Of ``DistributedLion``; None: AdamW under DDP.
        betas: Of ``DistributedLion``.
        ddp: What DDP sends, by its name in the lab.
        timed_as: The method whose steps take as long; None: its own are timed.
    """

    title: str
    color: str
    center: Mapping[str, float]
    rule: str | None = None
    betas: tuple[float, float] = LION_BETAS
    ddp: str = ""
    timed_as: str | None = None


_ADAMW = {"images": 16e-3, "text": 4e-3}
_LION = {"images": 8e-4, "text": 8e-4}
METHODS = {
    "majority": Method("majority vote, 1 bit", "#d9541e", _LION, "majority"),
    "majority-betas-90-95": Method(
        "majority vote, betas (0.9, 0.95)",
        "#a02c2c",
        {"images": 3.2e-3, "text": 1.6e-3},
        "majority",
        (0.9, 0.95),
        timed_as="majority",
    ),
    "quantized-2": Method("two-bit votes", "#e8a33d", _LION, "quantized-2"),
    "global-adamw": Method("DDP, fp32 + AdamW", "#30343b", _ADAMW, ddp=DDP_FP32),
    "fp16-adamw": Method("DDP, fp16 hook + AdamW", "#7d8796", _ADAMW, ddp=DDP_FP16),
    "powersgd-adamw": Method("DDP, PowerSGD hook + AdamW", "#3a78b5", _ADAMW, ddp=DDP_POWERSGD),
}
TIMED = tuple(name for name, method in METHODS.items() if method.timed_as is None)
"""Methods whose steps are timed."""
LONGER = "majority"
"""Also trained for twice as many steps, at the same rate."""
LONGER_TITLE = f"{METHODS[LONGER].title}, twice the steps"
FLOOR = "none"
"""AdamW without any communication: timed, not trained."""


@dataclass(frozen=True)
class TargetCell(Cell):
    """A method on a task; rates begin around centers of their own."""

    @property
    def center(self) -> float:
        return METHODS[self.method].center[self.setting.task]

    def config(self, rate: float, seed: int, *, is_tuning: bool) -> RunConfig:
        """Return one run; while rates are tuned, only its end is scored."""
        config = super().config(rate, seed, is_tuning=is_tuning)
        return replace(config, evaluations=1) if is_tuning else config


def make_cell(task: str, method: str) -> TargetCell:
    """Return the cell of a method.

    The mean gradient of AdamW does not depend on N but by rounding. Halves change it by rounding
    too, so that ``fp16-adamw`` has the rate of AdamW.
    """
    workers = 0 if method == "global-adamw" else HOSTS
    tuned_as = make_cell(task, "global-adamw") if method == "fp16-adamw" else None
    return TargetCell(SETTINGS[task], method, workers, tuned_as=tuned_as)


def make_longer(task: str) -> TargetCell:
    """Return the cell of twice as many steps."""
    base = make_cell(task, LONGER)
    setting = replace(base.setting, steps=2 * base.setting.steps, evaluations=2 * EVALUATIONS)
    return replace(base, setting=setting, tuned_as=base)


def list_cells(task: str) -> list[TargetCell]:
    """Return the cells of a task in the order in which they are run."""
    return [*(make_cell(task, method) for method in METHODS), make_longer(task)]


def list_open_runs(cells: list[TargetCell], find: Find) -> list[RunConfig]:
    """Return what can be run now and has not been: rates to be tried first, then by seed."""
    tuning, reported = [], []
    for cell in cells:
        choice = choose_rate(cell, find)
        if choice.rate is None:
            tuning += list(choice.wanted)
        else:
            reported += [cell.config(choice.rate, seed, is_tuning=False) for seed in SEEDS]
    missing = [run for run in reported if find(run.name) is None]
    missing.sort(key=lambda run: (run.steps > SETTINGS[run.task].steps, run.seed))
    # Two cells may wait for the same tuning.
    return [*{run.name: run for run in tuning}.values(), *missing]


@dataclass(frozen=True)
class Target:
    """What a method must reach.

    Attributes:
        name: ``close`` or ``rough``.
        value: Test accuracy that is at least this, or test loss that is at most this.
    """

    name: str
    value: float


def set_targets(task: str, find: Find) -> list[Target]:
    """Derive targets from AdamW's tuning; none before it is tuned."""
    return derive_targets(make_cell(task, "global-adamw"), find)


def derive_targets(adamw: Cell, find: Find) -> list[Target]:
    """Derive targets from the validation data of AdamW's tuning run at its best rate.

    Images: 2 and 6 points below its accuracy, rounded down to whole points. Text: 0.1 and 0.2 nats
    a byte above its loss, rounded up to twentieths.
    """
    rate = choose_rate(adamw, find).rate
    record = None if rate is None else find(adamw.tuning(rate).name)
    if record is None:
        return []
    _, loss, accuracy = record["validation"][-1]
    if adamw.setting.task == "images":
        points_reached = round(100 * accuracy, 6)  # 100 * 0.57 is a little less than 57
        return [
            Target(name, math.floor(points_reached - points) / 100)
            for name, points in (("close", 2), ("rough", 6))
        ]
    return [
        Target(name, math.ceil(round(20 * (loss + nats), 6)) / 20)
        for name, nats in (("close", 0.1), ("rough", 0.2))
    ]
