"""Outcomes that are taken later, and parts that take turns: what they cost and save in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import target_path  # noqa: F401
from archive import Records
from arrivals import read_seconds
from cells import SEEDS, Find, choose_rate
from contest import FIRST, SETTINGS, SIMPLEST, Local, make_cell
from crossing import cross
from runs import RunConfig

from distlion_lab.report.document import Block, Heading, Paragraph, Table, render_markdown

NAME = "local_steps_late"
PLAIN = Local(FIRST, SIMPLEST).method
LINKS = ("10mbit", "100mbit")
LATENCY_S = 0.05
"""One way. A round of Gloo takes a round trip, and an exchange has two rounds."""
ROUNDS = 2
TARGET_SHARE, MOST_SHARE_OF_SECONDS = 0.8, 0.95


@dataclass(frozen=True)
class Variant:
    """Arguments of ``LocalSteps`` that are compared with the plain ones.

    Attributes:
        parts, delay: As for ``LocalSteps``.
    """

    parts: int = 1
    delay: int = 0

    @property
    def method(self) -> str:
        """Name of its runs."""
        parts = f"-parts-{self.parts}" if self.parts > 1 else ""
        return f"{PLAIN}{parts}" + (f"-late-{self.delay}" if self.delay else "")

    def __str__(self) -> str:
        return f"`parts={self.parts}, delay={self.delay}`"

    def seconds_of(self, steps: float, *, compute_s: float, exchange_s: float) -> float:
        """Return the seconds of so many steps.

        Equation:
            e = e_0 / P + 2 rounds * 2 * 50 ms; a step takes c + P / H * max(0, e - D c)

        Args:
            steps: Their number.
            compute_s: c, of a local step.
            exchange_s: e_0, of an exchange of all parameters without latency.
        """
        exchange_s = exchange_s / self.parts + ROUNDS * 2 * LATENCY_S
        seen_s = max(0.0, exchange_s - self.delay * compute_s)
        return steps * (compute_s + self.parts / FIRST * seen_s)


VARIANTS = (Variant(delay=4), Variant(delay=7), Variant(parts=4), Variant(parts=4, delay=1))
ALL = (Variant(), *VARIANTS)


def list_late_runs(find: Find) -> list[RunConfig]:
    """Return the runs that are open, by seed, at the rate of the plain runs."""
    cell = make_cell("text", PLAIN)
    rate = choose_rate(cell, find).rate
    if rate is None:
        return []
    runs = [
        replace(cell.config(rate, seed, is_tuning=False), method=variant.method)
        for seed in SEEDS[:3]
        for variant in ALL
    ]
    return [run for run in runs if find(run.name) is None]


def write_late_report(records: Records, folder: Path) -> Path:
    """Write the page, computed from the records and nothing else."""
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(list(_lay_out(records))))
    return path


def read_curves(records: Records) -> Mapping[Variant, list[list[list[float]]]]:
    """Return the test curves of each variant whose seeds are all there."""
    cell = make_cell("text", PLAIN)
    rate = choose_rate(cell, records.read).rate
    found = {}
    for variant in ALL if rate is not None else ():
        assert rate is not None
        configs = [cell.config(rate, seed, is_tuning=False) for seed in SEEDS[:3]]
        each = [records.read(replace(config, method=variant.method).name) for config in configs]
        if all(record is not None and not record["diverged"] for record in each):
            found[variant] = [record["test_curve"] for record in each if record is not None]
    return found


def find_target(curves: list[list[list[float]]]) -> float:
    """Return the mean loss of the plain runs after four fifths of their steps."""
    wanted = TARGET_SHARE * SETTINGS["text"].steps
    at = [next(row[1] for row in curve if row[0] >= wanted) for curve in curves]
    return fmean(at)


def time_variant(
    variant: Variant, curves: list[list[list[float]]], target: float, blocks: Mapping[str, Any]
) -> list[float] | None:
    """Return each seed's seconds to the target on a link; None where a seed does not reach it."""
    costs = {"compute_s": median(blocks["compute"]), "exchange_s": median(blocks["scaled"])}
    steps = [cross(curve, "text", target) for curve in curves]
    if any(each is None for each in steps):
        return None
    return [variant.seconds_of(each, **costs) for each in steps if each is not None]


def _lay_out(records: Records) -> Iterator[Block]:
    yield Heading("Local steps: later outcomes, and parts that take turns", level=1)
    curves, seconds = read_curves(records), read_seconds(records.folder, "text")
    if Variant() not in curves or seconds is None:
        yield Paragraph("Nothing has been run.")
        return
    target = find_target(curves[Variant()])
    yield Paragraph(
        f"Text, 1.07 million parameters, 8 workers, H = {FIRST}, `ScaledVote()`, three seeds. "
        f"Seconds to a test loss of {target:.3f} are computed for links with {LATENCY_S * 1e3:.0f} "
        "ms of latency each way. [The protocol](../../studies/local-steps-protocol.md) was there "
        "before the runs."
    )
    rows = []
    plain = {
        link: time_variant(Variant(), curves[Variant()], target, seconds["seconds"][link])
        for link in LINKS
    }
    for variant in ALL:
        if variant not in curves:
            rows.append([str(variant), "not run", "", "", ""])
            continue
        last = fmean(curve[-1][1] for curve in curves[variant])
        cells, keeps = [], False
        for link in LINKS:
            own, base = (
                time_variant(variant, curves[variant], target, seconds["seconds"][link]),
                plain[link],
            )
            if own is None or base is None:
                cells.append("does not reach it")
                continue
            ratios = [a / b for a, b in zip(own, base, strict=True)]
            share = fmean(own) / fmean(base)
            keeps |= share <= MOST_SHARE_OF_SECONDS and max(ratios) < 1
            cells.append(f"{fmean(own):.0f} s, {share:.2f} of the first row's")
        rows.append([str(variant), f"{last:.3f}", *cells, "yes" if keeps else "no"])
    header = ["", "last test loss", "10 Mbit/s", "100 Mbit/s", "wins 5 %"]
    yield Table(header, rows)
