"""Which cells are run, in which order, and how betas and decay are chosen: the protocol as code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import study_path  # noqa: F401
from cells import Cell, Choice, Find, choose_rate, list_open
from delayed import DELAYED
from runs import RunConfig
from settings import (
    BASES,
    CAUTIOUS,
    DECAYS,
    FAMILIES,
    FEWER_SEEDS,
    FIVE_SEEDS,
    MASKED,
    MASKED_COIN,
    MATRIX_FAMILIES,
    MOST_SEEDS,
    ORTHOGONAL,
    OTHERS,
    PAPER,
    RATE_FROM,
    SETTINGS,
    SHORT,
)

# The method around whose best rate a grid begins, by the beginning of a name; the first one counts.
_KIN = (
    (f"{DELAYED}{CAUTIOUS}", CAUTIOUS),
    (f"{DELAYED}{ORTHOGONAL}", ORTHOGONAL),
    ("global-muon-", "global-adamw"),
    ("global-lion-orthogonal-", "global-adamw"),
    (ORTHOGONAL, "global-adamw"),
    ("majority-orthogonal-each-", ORTHOGONAL),
    ("ternary-orthogonal-", ORTHOGONAL),
    ("library-feedback-2-orthogonal-", ORTHOGONAL),
    ("orthogonal-", ORTHOGONAL),
    ("global-adamw-", "global-adamw"),
    ("one-bit-adam", "global-adamw"),
    ("powersgd-adamw", "global-adamw"),
    ("global-adamw", None),
    ("global-lion-", SHORT),
    ("global-lion", None),
    ("majority-cautious", SHORT),
    ("majority-betas-", "signum"),
    ("signum", PAPER),
    ("majority", None),
    ("", SHORT),
)


def make_cell(setting: str, method: str, workers: int = 4) -> Cell:
    """Return a cell of even data: around which rate its grid begins, or whose rate it has.

    Methods that see only the mean gradient do not depend on the number of workers.
    """
    sees_mean = method.startswith("global-")
    cell = Cell(
        SETTINGS[setting],
        method,
        0 if sees_mean else workers,
        seeds=MOST_SEEDS if setting in FIVE_SEEDS else FEWER_SEEDS,
    )
    if setting in RATE_FROM:
        return replace(cell, tuned_as=make_cell(RATE_FROM[setting], method, workers))
    base = BASES[cell.setting.task]
    if workers != 4 and not sees_mean:
        return replace(cell, centered_on=make_cell(setting, method))
    if setting != base:
        return replace(cell, centered_on=make_cell(base, method))
    decay = next((end for end in DECAYS if end and method.endswith(end)), "")
    if decay:
        return replace(cell, centered_on=make_cell(base, method.removesuffix(decay)))
    kin = next(kin for begin, kin in _KIN if method.startswith(begin))
    return cell if kin is None else replace(cell, centered_on=make_cell(base, kin))


def identify(cell: Cell) -> str:
    """Return what tells a cell from all others."""
    return cell.tuning(1.0).name


@dataclass(frozen=True)
class Recipe:
    """What tuning has come to for a family on a task.

    Attributes:
        trials: The choice of a rate for each name that was tried, so far.
        wanted: Runs to be made before the next step of the choice.
        method: The name that won; None before.
    """

    trials: dict[str, Choice]
    wanted: tuple[RunConfig, ...]
    method: str | None


def choose_recipe(family: str, task: str, find: Find) -> Recipe:
    """Choose betas, then decay, by the lowest validation loss at the base setting."""
    trials: dict[str, Choice] = {}
    names: tuple[str, ...] = {**FAMILIES, **MATRIX_FAMILIES}[family].candidates
    for ends in ((), DECAYS):
        names = tuple(f"{names[0]}{end}" for end in ends) if ends else names
        found = {name: choose_rate(make_cell(BASES[task], name), find) for name in names}
        trials |= found
        wanted = [run for choice in found.values() for run in choice.wanted]
        if any(choice.rate is None for choice in found.values()):
            return Recipe(trials, tuple({run.name: run for run in wanted}.values()), None)
        names = (min(names, key=lambda name: best_loss(found[name])),)
    return Recipe(trials, (), names[0])


def best_loss(choice: Choice) -> float:
    """Return the validation loss at the rate that was chosen."""
    assert choice.rate is not None  # the caller asked before
    return choice.losses[choice.rate]


@dataclass(frozen=True)
class Part:
    """Cells that answer one question.

    Attributes:
        name: Of the part.
        settings: Names of its settings.
        workers: Their numbers.
        methods: Which ones, beside those of ``families``.
        families: Those whose tuned recipe is run.
        conditions: (alpha, attackers, factor) of uneven data; one of even data for most.
        seeds: Of its reported runs; None for those of its settings.
        is_screened: Whether tuning is all.
    """

    name: str
    settings: tuple[str, ...]
    workers: tuple[int, ...] = (4,)
    methods: tuple[str, ...] = (PAPER, SHORT, CAUTIOUS)
    families: tuple[str, ...] = ()
    conditions: tuple[tuple[float | None, int, float], ...] = ((None, 0, 1.0),)
    seeds: tuple[int, ...] | None = None
    is_screened: bool = False

    def list_cells(self, find: Find) -> list[Cell]:
        """Return its cells, as far as recipes have been chosen."""
        found: dict[str, Cell] = {}
        for setting in self.settings:
            for workers in self.workers:
                for method in (*self._list_recipes(setting, find), *self.methods):
                    even = make_cell(setting, method, workers)
                    seeds = even.seeds if self.seeds is None else self.seeds
                    even = replace(even, seeds=seeds, is_screened=self.is_screened)
                    found |= {identify(cell): cell for cell in self._list_uneven(even)}
        return list(found.values())

    def list_wanted(self, find: Find) -> list[RunConfig]:
        """Return runs that a choice of betas or decay waits for."""
        tasks = {SETTINGS[setting].task for setting in self.settings}
        recipes = [choose_recipe(each, task, find) for each in self.families for task in tasks]
        return [run for recipe in recipes for run in recipe.wanted]

    def _list_recipes(self, setting: str, find: Find) -> list[str]:
        task = SETTINGS[setting].task
        chosen = [choose_recipe(family, task, find).method for family in self.families]
        return [method for method in chosen if method is not None]

    def _list_uneven(self, even: Cell) -> Iterator[Cell]:
        for alpha, attackers, factor in self.conditions:
            if alpha is None and not attackers:
                yield even
                continue
            uneven = replace(even, alpha=alpha, attackers=attackers, factor=factor)
            workers = even.workers or 8  # a mean of skewed workers depends on who they are
            seeds = FEWER_SEEDS if self.seeds is None else self.seeds
            yield replace(uneven, workers=workers, tuned_as=even, centered_on=None, seeds=seeds)


_ALL = tuple(FAMILIES)
_UNEVEN = ((0.1, 0, 1.0), (1.0, 0, 1.0), (None, 1, -100.0), (None, 2, -1.0))
_FEEDBACKS = ("library-feedback-2-betas-90-95", "library-feedback-2-cautious-betas-90-95")
PARTS = (
    Part("text-base", ("text-small-1k",), methods=(PAPER, SHORT, CAUTIOUS, *OTHERS), families=_ALL),
    Part("images-base", ("images-3",), methods=(PAPER, SHORT, CAUTIOUS, *OTHERS), families=_ALL),
    Part(
        "workers",
        ("text-small-1k", "images-3"),
        workers=(8, 32),
        methods=(PAPER, SHORT, CAUTIOUS, MASKED, _FEEDBACKS[0]),
        families=("adamw",),
    ),
    Part("text-longer", ("text-small-4k",), families=_ALL),
    Part("text-wider", ("text-medium-1k",), families=_ALL),
    Part("images-longer", ("images-10",), families=_ALL),
    Part(
        "conditions",
        ("images-3",),
        workers=(8,),
        methods=("global-adamw", SHORT, CAUTIOUS, *_FEEDBACKS),
        conditions=_UNEVEN,
    ),
    Part("text-longest", ("text-small-16k", "text-medium-4k"), families=("adamw",)),
    Part("images-longest", ("images-30",), families=("adamw",)),
    Part("text-widest", ("text-large-1k",), families=("adamw",)),
)
REPLIES = Part("replies", ("text-small-1k",), workers=(32,), methods=(MASKED, MASKED_COIN))
"""Chooses the bits of a reply after the mask at the counter; none of the study's claims."""


def list_open_runs(parts: tuple[Part, ...], find: Find) -> list[RunConfig]:
    """Return what can be run now and has not been: by part, choices first, then by seed."""
    found: dict[str, RunConfig] = {}
    for part in parts:
        runs = [run for cell in part.list_cells(find) for run in list_open(cell, find)]
        runs = [*part.list_wanted(find), *sorted(runs, key=lambda run: run.seed)]
        found |= {run.name: run for run in runs}
    return list(found.values())
