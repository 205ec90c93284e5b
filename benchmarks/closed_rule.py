"""Compute what a choice of the exchange pattern would lose without a measurement of the link.

    python benchmarks/closed_rule.py

By the cost model (`distlion.wire.cost`), not by measurements. Each case is a rule, a
number of workers, a number of parameters and a link. The choice for a typical link is compared with
the best pattern for that link. Writes benchmarks/results/closed_rule.md in a minute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import distlion
from distlion.step.settings import DEFAULT_BUCKET_ELEMENTS
from distlion.wire import LinkModel
from distlion.wire.cost import choose_exchange, exchange_seconds

TYPICAL_LINK = LinkModel(1e-3, 1e9)
RESULTS = Path(__file__).parent / "results/closed_rule.md"
RULES = (
    distlion.MajorityVote(),
    distlion.QuantizedVote(bits=4),
    distlion.Average(),
    distlion.FullPrecision(),
)
WORKERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PARAMS = tuple(map(int, (1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 1e9)))
RATES = (1e8, 1e9, 1e10, 2.5e10)
LATENCIES_S = (5e-5, 2e-4, 1e-3, 5e-3, 2e-2, 5e-2)
OTHER_LINKS = tuple(itertools.product((2e-4, 5e-4, 1e-3, 2e-3), (1e8, 1e9, 1e10)))


class Case(NamedTuple):
    """A bucket of a rule on a link, with the loss of a choice."""

    rule: object
    workers: int
    params: int
    link: LinkModel
    chosen: str
    best: str
    loss: float


def is_usual(link: LinkModel) -> bool:
    """Return whether there are such links: above 1 ms, hosts get at most 1 Gbit/s."""
    return link.latency_s <= 1e-3 or link.rate_bit_per_s <= 1e9


def list_cases(typical: LinkModel) -> list[Case]:
    """List all cases, with the loss of the choice for a typical link."""
    links = [LinkModel(latency_s, rate) for rate in RATES for latency_s in LATENCIES_S]
    cases = []
    for rule, workers, params in itertools.product(RULES, WORKERS, PARAMS):
        shape = rule.shape_of(min(params, DEFAULT_BUCKET_ELEMENTS), workers)
        chosen = choose_exchange(shape, typical)
        for link in links:
            best = choose_exchange(shape, link)
            loss = exchange_seconds(chosen, shape, link) / exchange_seconds(best, shape, link) - 1
            cases.append(Case(rule, workers, params, link, repr(chosen), repr(best), loss))
    return cases


def summarize(name: str, cases: Sequence[Case]) -> str:
    """Return a row: the share that loses at most 5 %, the mean loss, and quantiles."""
    losses = sorted(case.loss for case in cases)
    within = mean(loss <= 0.05 for loss in losses)
    at = [losses[int(share * len(losses))] for share in (0.9, 0.95)]
    rest = " | ".join(f"{loss:.0%}" for loss in (mean(losses), *at, losses[-1]))
    return f"| {name} | {len(losses)} | {within:.1%} | {rest} |"


def describe_worst(cases: Sequence[Case]) -> list[str]:
    """Return a row for the worst case of each number of workers."""
    rows = []
    for workers in WORKERS:
        worst = max((each for each in cases if each.workers == workers), key=lambda c: c.loss)
        link = f"{worst.link.rate_bit_per_s / 1e9:g} Gbit/s, {1e3 * worst.link.latency_s:g} ms"
        rows.append(
            f"| {workers} | {worst.rule} | {worst.params:,} | {link} | {worst.chosen} | "
            f"{worst.best} | {worst.loss:.0%} |"
        )
    return rows


def write_report() -> str:
    """Return the page."""
    cases = list_cases(TYPICAL_LINK)
    usual = [case for case in cases if is_usual(case.link)]
    head = "| cases | number | lose 5 % or less | mean loss | 90th percentile | 95th | worst |"
    line = "|---|---:|---:|---:|---:|---:|---:|"
    others = []
    for latency_s, rate in OTHER_LINKS:
        found = [each for each in list_cases(LinkModel(latency_s, rate)) if is_usual(each.link)]
        others.append(summarize(f"{rate / 1e9:g} Gbit/s, {1e3 * latency_s:g} ms", found))
    return "\n".join(
        (
            '# What `exchange="auto"` would lose without its measurement',
            "",
            "Written by `python benchmarks/closed_rule.py`, by the cost model. The choice is the "
            "fastest pattern on a link of 1 Gbit/s and 1 ms.",
            f"Cases: {len(RULES)} rules, 2 to 64 workers, 10^5 to 10^9 parameters, 0.1 to 25 "
            "Gbit/s, 0.05 to 50 ms. Usual links have at most 1 Gbit/s above 1 ms.",
            "",
            *(head, line, summarize("all", cases), summarize("usual links", usual)),
            *("", "The worst case on a usual link:", ""),
            "| workers | rule | parameters | link | chosen | best | loss |",
            "|---:|---|---:|---|---|---|---:|",
            *describe_worst(usual),
            *("", "Usual links, where the choice is that of another link:", "", head, line),
            *others,
            "",
        )
    )


if __name__ == "__main__":
    RESULTS.write_text(write_report())
    print(RESULTS.read_text())
