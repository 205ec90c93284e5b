"""Compare fractions of AdamW's learning rate as a first try for cautious votes.

    python benchmarks/first_rate.py              # the report, from the records
    python benchmarks/first_rate.py run --books FOLDER --images FOLDER     # missing runs; resumes

A user knows AdamW's rate, and votes need another one. Which fraction of it should be tried first?
Fixed before the runs:

- Cells: the text task of the quality study (GPT of 0.12 million parameters, 4 workers, 64 windows a
  step) for 300 and 600 steps, three tuning seeds each; and four cells of the study, one tuning
  seed each: text for 1,000 and 4,000 steps, a GPT of 1.07 million parameters, CIFAR-10 for 3
  epochs. All losses are validation losses. Fractions that the study did not try are run.
- AdamW's rate of a cell is its best one. Where a best rate lies at the edge of the grid, the grid
  is extended by a factor of two.
- The regret of a fraction is the loss of cautious votes at this fraction of AdamW's rate, less
  their lowest loss in the cell. The mean over seeds counts. A run that diverged has infinite loss.
- The advice is the fraction among 1, 1/2, 1/4 and 1/8 whose largest regret over all cells is the
  lowest. Short runs (text, up to 600 steps) get advice of their own only if another fraction lowers
  the largest regret over their cells by 0.03 or more.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "study"))

from archive import Records  # noqa: E402
from cells import Cell, Find, Setting  # noqa: E402
from plan import IMAGES, TEXT  # noqa: E402
from runs import RunConfig  # noqa: E402
from sources import Data, make  # noqa: E402
from work import run_until_done  # noqa: E402

RESULTS = HERE / "results"
ADAMW, VOTES = "global-adamw-betas-90-99-decay-4", "majority-cautious-betas-90-95"
IMAGES_ADAMW = "global-adamw-betas-90-99"
FRACTIONS = (1.0, 0.5, 0.25, 0.125)
LEAST_GAIN = 0.03
SHORT_STEPS = 600
SEEDS = (0, 1, 2)
ADAMW_RATES = (0.004, 0.008, 0.016)
WORKERS = 4
MOST_RATES = 12


@dataclass(frozen=True)
class Budget:
    """A task and its length.

    Attributes:
        title: For the report.
        setting: Task, steps, network.
        seeds: Seeds of its runs.
        is_new: Whether the study has no tuning records of it.
        adamw: Name of AdamW with the betas and decay that tuning chose.
    """

    title: str
    setting: Setting
    seeds: tuple[int, ...] = (0,)
    is_new: bool = False
    adamw: str = ADAMW

    @property
    def is_short(self) -> bool:
        return self.setting.task == "text" and self.setting.steps <= SHORT_STEPS

    def config(self, method: str, rate: float, seed: int) -> RunConfig:
        workers = 0 if method == self.adamw else WORKERS
        return Cell(self.setting, method, workers).config(rate, seed, is_tuning=True)


_WIDE_TEXT = {"width": 168, "layers": 3, "heads": 4, "context": 64}
BUDGETS = (
    *(
        Budget(f"text, {n} steps", replace(TEXT, steps=n, evaluations=3), SEEDS, is_new=True)
        for n in (300, 600)
    ),
    Budget("text, 1,000 steps", TEXT),
    Budget("text, 4,000 steps", Setting("text", 4000, 64, 16, TEXT.network)),
    Budget("text, 1.07 million parameters, 1,000 steps", Setting("text", 1000, 64, 8, _WIDE_TEXT)),
    Budget("CIFAR-10, 3 epochs", IMAGES, adamw=IMAGES_ADAMW),
)

Losses = Mapping[float, float]
"""Mean validation loss over seeds by rate; infinite where a run diverged."""


@dataclass(frozen=True)
class Tried:
    """The runs of one method in one budget.

    Attributes:
        losses: Of all rates that ran with every seed.
        wanted: Runs still to be made.
    """

    losses: Losses
    wanted: tuple[RunConfig, ...] = ()

    @property
    def best(self) -> float:
        return min(self.losses, key=lambda rate: self.losses[rate])


def list_rates(budget: Budget, method: str, study: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the rates at which the study tuned a method."""
    return [
        record["config"]["lr"]
        for record in study
        if record["name"] == budget.config(method, record["config"]["lr"], 0).name
    ]


def try_rates(budget: Budget, method: str, rates: Sequence[float], find: Find) -> Tried:
    """Return losses at these rates, and beyond an edge at which the best lies."""
    tried = sorted(set(rates))
    while True:
        losses: dict[float, float] = {}
        wanted: list[RunConfig] = []
        for rate in tried:
            runs = [budget.config(method, rate, seed) for seed in budget.seeds]
            records = [find(run.name) for run in runs]
            wanted += [run for run, found in zip(runs, records, strict=True) if found is None]
            losses[rate] = fmean(
                math.inf if found is None else _final_loss(found) for found in records
            )
        if wanted:
            return Tried({}, tuple(wanted))
        best = min(losses, key=lambda rate: losses[rate])
        if best not in (tried[0], tried[-1]) or len(tried) >= MOST_RATES:
            return Tried(losses)
        tried = [_round(best / 2), *tried] if best == tried[0] else [*tried, _round(best * 2)]


def _final_loss(record: Mapping[str, Any]) -> float:
    return math.inf if record["diverged"] else float(record["validation"][-1][1])


def _round(rate: float) -> float:
    return float(f"{rate:.4g}")


@dataclass(frozen=True)
class Outcome:
    """A budget whose runs are all made."""

    budget: Budget
    adamw: Tried
    votes: Tried

    def regret(self, fraction: float) -> float:
        """Return the loss at a fraction of AdamW's rate, less the lowest."""
        loss = self.votes.losses[_round(self.adamw.best * fraction)]
        return loss - self.votes.losses[self.votes.best]


def look(
    budget: Budget, find: Find, study: Sequence[Mapping[str, Any]]
) -> tuple[Outcome | None, list[RunConfig]]:
    """Return the outcome of a budget, or the runs that it waits for."""
    tuned = [] if budget.is_new else list_rates(budget, budget.adamw, study)
    adamw = try_rates(budget, budget.adamw, tuned or ADAMW_RATES, find)
    if adamw.wanted:
        return None, list(adamw.wanted)
    rates = [_round(adamw.best * fraction) for fraction in (2.0, *FRACTIONS)]
    rates = rates if budget.is_new else [*rates[1:], *list_rates(budget, VOTES, study)]
    votes = try_rates(budget, VOTES, rates, find)
    return (None, list(votes.wanted)) if votes.wanted else (Outcome(budget, adamw, votes), [])


def largest_regret(outcomes: Sequence[Outcome], fraction: float) -> float:
    """Return the largest regret of a fraction."""
    return max(outcome.regret(fraction) for outcome in outcomes)


def choose(outcomes: Sequence[Outcome]) -> float:
    """Return the fraction whose largest regret is the lowest."""
    return min(FRACTIONS, key=lambda fraction: largest_regret(outcomes, fraction))


def decide(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the advised fraction for all runs, and for short ones."""
    everywhere = choose(outcomes)
    short = [outcome for outcome in outcomes if outcome.budget.is_short]
    best = choose(short)
    gain = largest_regret(short, everywhere) - largest_regret(short, best)
    return everywhere, best if gain >= LEAST_GAIN else everywhere


def lay_out(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the report."""
    everywhere, short = decide(outcomes)
    yield "# Which fraction of AdamW's learning rate to try first"
    yield ""
    yield (
        "Made by `python benchmarks/first_rate.py`, whose docstring is the protocol, fixed before "
        "the runs. Cautious majority votes, 4 workers, betas (0.9, 0.95). Validation loss, nats a "
        "byte on text. A cell shows the loss above the votes' lowest at that fraction of AdamW's "
        "best rate."
    )
    yield ""
    yield f"**Advice: {_name(everywhere)} of AdamW's rate; up to 600 steps {_name(short)}.**"
    yield ""
    heads = [_name(each) for each in FRACTIONS]
    yield _row(["run", "AdamW's best rate", "votes' best", *heads, "best votes less AdamW"])
    yield _row(["---", *["---:"] * (len(heads) + 3)])
    for each in outcomes:
        regrets = [each.regret(fraction) for fraction in FRACTIONS]
        gap = each.votes.losses[each.votes.best] - each.adamw.losses[each.adamw.best]
        shown = [f"{regret:+.3f}" for regret in regrets]
        rates = [f"{each.adamw.best:g}", f"{each.votes.best:g}"]
        yield _row([each.budget.title, *rates, *shown, f"{gap:+.3f}"])
    for title, chosen in (("largest", outcomes), ("largest, up to 600 steps", _short(outcomes))):
        worst = [f"{largest_regret(chosen, fraction):+.3f}" for fraction in FRACTIONS]
        yield _row([f"**{title}**", "", "", *worst, ""])
    yield ""
    yield "## Beside an AdamW that was not tuned"
    yield ""
    yield (
        "Votes at a fraction of AdamW's rate, less AdamW at that rate: text, mean of three seeds. "
        "AdamW's own rate is seldom tuned. The lower it is, the larger the best fraction."
    )
    yield ""
    yield _row(["run", "AdamW's rate", *heads])
    yield _row(["---", *["---:"] * (len(heads) + 1)])
    for each in _short(outcomes):
        for rate, loss in each.adamw.losses.items():
            at = [each.votes.losses.get(_round(rate * fraction)) for fraction in FRACTIONS]
            shown = ["-" if votes is None else f"{votes - loss:+.3f}" for votes in at]
            yield _row([each.budget.title, f"{rate:g}", *shown])


def _short(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.budget.is_short]


def _name(fraction: float) -> str:
    return "all" if fraction == 1 else f"1/{1 / fraction:g}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> int:
    """Run what is missing, or write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run", help="make the runs that are missing")
    run.add_argument("--books", type=Path, help="folder of *.txt, a book each")
    run.add_argument("--images", type=Path, help="folder of CIFAR-10's Python batches")
    args = parser.parse_args(words)
    records, earlier = Records(args.results / "first_rate"), Records(RESULTS / "runs")
    study = earlier.read_all()
    tuned = {record["name"]: record for record in study}

    def find(name: str) -> Mapping[str, Any] | None:
        return tuned.get(name) or records.read(name)

    if args.command == "run":
        torch.set_num_threads(1)  # bits depend on it
        data = Data(args.images, args.books)

        def list_open() -> list[RunConfig]:
            wanted = [run for each in BUDGETS for run in look(each, find, study)[1]]
            return [run for run in wanted if data.has(run.task)]

        run_until_done(list_open, records, partial(make, data))
        return 0
    looked = [look(each, find, study) for each in BUDGETS]
    n_open = sum(len(runs) for _, runs in looked)
    if n_open:
        print(f"{n_open} runs or more are missing: see --help", file=sys.stderr)
        return 1
    outcomes = [outcome for outcome, _ in looked if outcome is not None]
    path = args.results / "first_rate.md"
    path.write_text("\n".join(lay_out(outcomes)) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
