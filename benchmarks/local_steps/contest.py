"""Tasks, methods, learning rates and lengths of runs: the protocol as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import target_path  # noqa: F401
from cells import Cell, Find, Setting, choose_rate
from inner_kinds import GROUPED_LION, MUON, split_inner
from runs import RunConfig
from settings import TargetCell

WORKERS = 8
LINKS = ("10mbit", "100mbit", "1mbit")
PERIODS = (8, 4, 16, 32)
"""H; everything is tuned at the first."""
FIRST = PERIODS[0]
LONGER = 3
"""A longer run has so many times the steps of DDP."""
SETTINGS: Mapping[str, Setting] = {
    "text": Setting("text", 448, 64, 14, {"width": 168, "layers": 3, "heads": 4, "context": 64}),
    "images": Setting("images", 1056, 128, 33, {"width": 16, "groups": 2}),
}
"""Scored every 32 steps, so that each score follows an exchange of every H."""

DDP, DDP_FP16, POWERSGD, ONE_BIT = "global-adamw", "fp16-adamw", "powersgd-1-adamw", "one-bit-adam"
POWERSGD_4 = "powersgd-adamw"
MAJORITY, SHORT = "majority", "majority-betas-90-95"
ALWAYS = (DDP, DDP_FP16, POWERSGD, POWERSGD_4, ONE_BIT, MAJORITY, SHORT)
"""Methods that exchange in each step."""
MOST_RATES = 5
"""Three, extended up to twice."""
RULES = ("scaled", "residual-1", "residual-2", "estimate-1", "estimate-2", "stochastic")
OUTERS = ("plain", "nesterov")
SIMPLEST = "scaled-plain"
VOTES = tuple(f"{rule}-{outer}" for rule in RULES for outer in OUTERS)
"""Rule and outer step of ``LocalSteps``; names of methods end so."""
PAST_VOTES = ("majority-lion", "feedback-2-lion")
"""Votes with an outer Lion, which ``LocalSteps`` had when they were tuned: shown, and not run."""
DILOCOS = ("diloco", "diloco-plain")
OTHERS = (*DILOCOS, "sparse")
"""Methods that exchange something other than votes every H steps."""
INNERS: Mapping[str, tuple[str, ...]] = {
    "": ("scaled-plain", "residual-2-plain", "diloco-plain"),
    MUON: ("scaled-plain", "residual-2-plain", "diloco-plain"),
    GROUPED_LION: ("scaled-plain", "residual-2-plain"),
}
"""What is exchanged over each inner optimizer that is compared; "" is AdamW."""
INNER_PERIODS = (FIRST, 32)

_CENTERS = {
    "text": {"adamw": 4e-3, "vote": 4e-4, "outer lion": 3.2e-3, GROUPED_LION: 1e-3},
    "images": {"adamw": 16e-3, "vote": 3.2e-3, "outer lion": 25.6e-3},
}
_LOCAL = re.compile(
    r"(?:local-(?P<voted>\d+)-(?P<vote>.+)|diloco-(?P<mean>\d+)(?P<plain>-plain)?"
    r"|sparse-(?P<sparse>\d+))"
)


@dataclass(frozen=True)
class Local:
    """The name of a method with local steps, taken apart.

    Attributes:
        every: H.
        kind: One of ``VOTES`` or ``OTHERS``, or of ``PAST_VOTES``.
        inner: Inner optimizer, a key of ``INNERS``; "" for AdamW.
    """

    every: int
    kind: str
    inner: str = ""

    @property
    def method(self) -> str:
        """Its name."""
        over = f"-over-{self.inner}" if self.inner else ""
        if self.kind in OTHERS:
            name, _, plain = self.kind.partition("-")
            return f"{name}-{self.every}" + ("-plain" if plain else "") + over
        return f"local-{self.every}-{self.kind}{over}"


def read_local(method: str) -> Local | None:
    """Read the name of a method; None where it exchanges in each step."""
    base, inner = split_inner(method)
    match = _LOCAL.fullmatch(base)
    if match is None:
        return None
    if match["voted"]:
        return Local(int(match["voted"]), match["vote"], inner)
    if match["mean"]:
        kind = "diloco-plain" if match["plain"] else "diloco"
        return Local(int(match["mean"]), kind, inner)
    return Local(int(match["sparse"]), "sparse", inner)


def is_run(method: str) -> bool:
    """Return whether the study runs a method with local steps."""
    local = read_local(method)
    if local is None or local.every not in PERIODS or local.kind not in (*VOTES, *OTHERS):
        return False
    is_compared = not local.inner or (
        local.kind in INNERS[local.inner] and local.every in INNER_PERIODS
    )
    return is_compared and method == local.method


@dataclass(frozen=True)
class ContestCell(TargetCell):
    """A method on a task; its reported curve is one of test data.

    Attributes:
        inner_rate: Of AdamW under an outer Lion, whose rate is the one that is tuned; else None.
    """

    inner_rate: float | None = None

    @property
    def center(self) -> float:
        centers = _CENTERS[self.setting.task]
        if self.inner_rate is not None:
            return centers["outer lion"]
        if self.method.endswith(f"-over-{GROUPED_LION}"):
            return centers[GROUPED_LION]
        return centers["vote" if self.method in (MAJORITY, SHORT) else "adamw"]

    @property
    def most_rates(self) -> int:
        return MOST_RATES

    def config(self, rate: float, seed: int, *, is_tuning: bool) -> RunConfig:
        """Return one run; the outer rate of Lion is part of the method's name."""
        if self.inner_rate is None:
            return super().config(rate, seed, is_tuning=is_tuning)
        config = super().config(self.inner_rate, seed, is_tuning=is_tuning)
        return replace(config, method=f"{self.method}-{rate:g}")

    @property
    def is_long(self) -> bool:
        """True if its runs are longer than DDP's."""
        return self.setting.steps > SETTINGS[self.setting.task].steps


def make_cell(task: str, method: str) -> ContestCell:
    """Return the cell of a method; a mean gradient does not depend on N but by rounding."""
    return ContestCell(SETTINGS[task], method, 0 if method == DDP else WORKERS)


def make_local_cell(task: str, kind: str, find: Find, every: int = FIRST) -> ContestCell | None:
    """Return the cell of local steps, tuned at the first H; None before an inner rate is known."""
    first: ContestCell = make_cell(task, Local(FIRST, kind).method)
    if kind in PAST_VOTES:
        inner = choose_rate(make_cell(task, Local(FIRST, SIMPLEST).method), find).rate
        if inner is None:
            return None
        first = replace(first, inner_rate=inner)
    if every == FIRST:
        return first
    return replace(first, method=Local(every, kind).method, tuned_as=first)


def make_inner_cell(kind: str, inner: str, every: int = FIRST) -> ContestCell:
    """Return the cell of an inner optimizer on text, tuned at the first H."""
    first = make_cell("text", Local(FIRST, kind, inner).method)
    if every == FIRST:
        return first
    return replace(first, method=Local(every, kind, inner).method, tuned_as=first)


def lengthen(cell: ContestCell) -> ContestCell:
    """Return the cell of longer runs, at the same rate."""
    steps, scores = LONGER * cell.setting.steps, LONGER * cell.setting.evaluations
    setting = replace(cell.setting, steps=steps, evaluations=scores)
    tuned_as: Cell = cell if cell.tuned_as is None else cell.tuned_as
    return replace(cell, setting=setting, tuned_as=tuned_as)


def has_long_runs(method: str) -> bool:
    """Return whether a method runs three times as long too: its steps are cheap."""
    return method in (MAJORITY, SHORT, POWERSGD_4) or read_local(method) is not None
