"""The outcome of tuning, the methods to report, and the order of all runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import target_path  # noqa: F401
from cells import Choice, Find, choose_rate, list_open
from contest import (
    ALWAYS,
    DDP,
    FIRST,
    INNER_PERIODS,
    INNERS,
    OTHERS,
    OUTERS,
    PAST_VOTES,
    PERIODS,
    SETTINGS,
    SIMPLEST,
    VOTES,
    ContestCell,
    has_long_runs,
    lengthen,
    make_cell,
    make_inner_cell,
    make_local_cell,
)
from runs import RunConfig

N_REPORTED = 2
_CLOSE = 1.005
"""The simplest vote is the default within 0.5 % of the best."""
NESTEROV = "-nesterov"
FIRST_RULES = ("scaled", "residual-1")
"""Nesterov's outer step is tuned with these first."""
_NEAR = 1.05
"""With other rules too if its loss is at most 5 % above the plain step's with one of these."""


def best_loss(choice: Choice) -> float | None:
    """Return the validation loss at the rate that was chosen; None before."""
    return None if choice.rate is None else choice.losses[choice.rate]


def find_loss(task: str, kind: str, find: Find) -> float | None:
    """Return the lowest validation loss of a vote and outer step; None before."""
    cell = make_local_cell(task, kind, find)
    return None if cell is None else best_loss(choose_rate(cell, find))


def is_nesterov_near(task: str, find: Find) -> bool | None:
    """Return whether Nesterov's step comes near the plain one; None before that is known."""
    ratios = []
    for rule in FIRST_RULES:
        plain, nesterov = (find_loss(task, f"{rule}-{outer}", find) for outer in OUTERS)
        if plain is None or nesterov is None:
            return None
        ratios.append(nesterov / plain)
    return min(ratios) <= _NEAR


def _is_later(kind: str) -> bool:
    return kind.endswith(NESTEROV) and kind.removesuffix(NESTEROV) not in FIRST_RULES


def tune_votes(task: str, find: Find) -> dict[str, float | None]:
    """Return the lowest validation loss of each vote and outer step that is run; None before.

    Those that were run, and no longer are, come last.
    """
    is_far = is_nesterov_near(task, find) is False
    kinds = [kind for kind in VOTES if not (is_far and _is_later(kind))]
    past = {kind: find_loss(task, kind, find) for kind in PAST_VOTES}
    return {kind: find_loss(task, kind, find) for kind in kinds} | {
        kind: loss for kind, loss in past.items() if loss is not None
    }


def choose_votes(task: str, find: Find) -> list[str] | None:
    """Return the votes that are reported: the best two and the simplest; None before."""
    losses = tune_votes(task, find)
    known = {kind: loss for kind, loss in losses.items() if loss is not None}
    if len(known) < len(losses):
        return None
    able = [kind for kind in known if kind in VOTES]
    best = sorted(able, key=lambda kind: known[kind])[:N_REPORTED]
    return best if SIMPLEST in best else [*best, SIMPLEST]


@dataclass(frozen=True)
class Default:
    """How the default vote is decided.

    Attributes:
        scores: Of each vote that is run on all tasks, the sum over tasks of its validation loss as
            a share of DDP's.
        chosen: The default.
    """

    scores: dict[str, float]
    chosen: str


def choose_default(find: Find) -> Default | None:
    """Return the vote of lowest loss over both tasks, or the simplest near it; None before."""
    scores = dict.fromkeys((*VOTES, *PAST_VOTES), 0.0)
    for task in SETTINGS:
        reference = best_loss(choose_rate(make_cell(task, DDP), find))
        losses = tune_votes(task, find)
        scores = {kind: score for kind, score in scores.items() if kind in losses}
        for kind in scores:
            loss = losses[kind]
            if loss is None or reference is None:
                return None
            scores[kind] += loss / reference
    best = min((kind for kind in scores if kind in VOTES), key=lambda kind: scores[kind])
    is_near = scores[SIMPLEST] <= _CLOSE * scores[best]
    return Default(scores, SIMPLEST if is_near else best)


def list_tuned(task: str, find: Find) -> list[ContestCell]:
    """Return every cell that has a rate of its own, as far as inner rates are known."""
    past = [kind for kind in PAST_VOTES if find_loss(task, kind, find) is not None]
    kinds = dict.fromkeys((SIMPLEST, *OTHERS, *VOTES, *past))
    if not is_nesterov_near(task, find):
        kinds = {kind: None for kind in kinds if not _is_later(kind)}
    local = (make_local_cell(task, kind, find) for kind in kinds)
    cells = [make_cell(task, method) for method in ALWAYS]
    return [*cells, *(cell for cell in local if cell is not None)]


def list_reported(task: str, find: Find, every: int = FIRST) -> list[ContestCell]:
    """Return the cells of an H that are reported, without longer runs; at the first H all."""
    kinds = [*(choose_votes(task, find) or []), *OTHERS]
    local = (make_local_cell(task, kind, find, every) for kind in kinds)
    together = [make_cell(task, method) for method in ALWAYS] if every == FIRST else []
    return [*together, *(cell for cell in local if cell is not None)]


def list_inner_cells(every: int = FIRST) -> list[ContestCell]:
    """Return the cells of all inner optimizers that are compared at an H, without longer runs."""
    pairs = [(kind, inner) for inner, kinds in INNERS.items() for kind in kinds]
    return [make_inner_cell(kind, inner, every) for kind, inner in pairs]


@dataclass(frozen=True)
class Part:
    """Runs that are made one after the other.

    Attributes:
        name: Of the part.
        task: Of its runs.
        every: H of what is reported; () tunes.
        is_long: Whether they are longer than DDP's.
        is_inner: Whether they compare inner optimizers.
    """

    name: str
    task: str
    every: tuple[int, ...] = ()
    is_long: bool = False
    is_inner: bool = False

    def list_cells(self, find: Find) -> list[ContestCell]:
        """Return its cells, as far as they are known."""
        if not self.every:
            return list_inner_cells() if self.is_inner else list_tuned(self.task, find)
        cells = [cell for each in self.every for cell in self._list_at(each, find)]
        if not self.is_long:
            return cells
        return [lengthen(cell) for cell in cells if has_long_runs(cell.method)]

    def _list_at(self, every: int, find: Find) -> list[ContestCell]:
        return list_inner_cells(every) if self.is_inner else list_reported(self.task, find, every)

    def list_open(self, find: Find) -> list[RunConfig]:
        """Return what can be run now and has not been: by seed."""
        cells = self.list_cells(find)
        if not self.every:
            return [run for cell in cells for run in choose_rate(cell, find).wanted]
        # Rates belong to the part that tunes.
        known = [cell for cell in cells if choose_rate(cell, find).rate is not None]
        runs = [run for cell in known for run in list_open(cell, find)]
        return sorted(runs, key=lambda run: run.seed)


_OTHER = PERIODS[1:]
PARTS = (
    Part("text-tuning", "text"),
    Part("text-8", "text", (FIRST,)),
    Part("text-8-long", "text", (FIRST,), is_long=True),
    Part("images-tuning", "images"),
    Part("images-8", "images", (FIRST,)),
    Part("images-8-long", "images", (FIRST,), is_long=True),
    Part("text-periods", "text", _OTHER),
    Part("text-periods-long", "text", _OTHER, is_long=True),
    Part("images-periods", "images", _OTHER),
    Part("images-periods-long", "images", _OTHER, is_long=True),
    Part("inner-tuning", "text", is_inner=True),
    *(Part(f"inner-{every}", "text", (every,), is_inner=True) for every in INNER_PERIODS),
    *(
        Part(f"inner-{every}-long", "text", (every,), is_long=True, is_inner=True)
        for every in INNER_PERIODS
    ),
)


def list_open_runs(parts: tuple[Part, ...], find: Find) -> list[RunConfig]:
    """Return what can be run now and has not been, part by part."""
    return list({run.name: run for run in _list_in_order(parts, find)}.values())


def _list_in_order(parts: tuple[Part, ...], find: Find) -> Iterator[RunConfig]:
    for part in parts:
        yield from part.list_open(find)
