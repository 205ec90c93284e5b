"""Outcomes that are taken later, and parts that take turns: what they cost and save in time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import target_path  # noqa: F401
from archive import Records
from arrivals import read_seconds
from cells import SEEDS, choose_rate
from contest import FIRST, SETTINGS, SIMPLEST, Local, make_cell
from crossing import cross

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


def write_late_report(records: Records, folder: Path) -> Path:
    """Write the page, computed from the records and nothing else."""
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(list(_lay_out(records))))
    return path


def read_curves(records: Records) -> Mapping[Variant, dict[int, list[list[float]]]]:
    """Return the test curves of each variant by seed, those that are there."""
    cell = make_cell("text", PLAIN)
    rate = choose_rate(cell, records.read).rate
    found: dict[Variant, dict[int, list[list[float]]]] = {variant: {} for variant in ALL}
    for variant in ALL if rate is not None else ():
        for seed in SEEDS[:3]:
            assert rate is not None
            config = cell.config(rate, seed, is_tuning=False)
            record = records.read(replace(config, method=variant.method).name)
            if record is not None and not record["diverged"]:
                found[variant][seed] = record["test_curve"]
    return found


def find_target(curves: Collection[list[list[float]]]) -> float:
    """Return the mean loss of the plain runs after four fifths of their steps."""
    wanted = TARGET_SHARE * SETTINGS["text"].steps
    return fmean(next(row[1] for row in curve if row[0] >= wanted) for curve in curves)


def time_variant(
    variant: Variant, curve: list[list[float]], target: float, blocks: Mapping[str, Any]
) -> float | None:
    """Return a seed's seconds to the target on a link; None where it does not reach it."""
    steps = cross(curve, "text", target)
    if steps is None:
        return None
    costs = {"compute_s": median(blocks["compute"]), "exchange_s": median(blocks["scaled"])}
    return variant.seconds_of(steps, **costs)


def judge(own: Mapping[int, float | None], plain: Mapping[int, float | None]) -> str:
    """Judge a variant on one link by the protocol: "wins", "lost" or "not yet".

    Args:
        own: Seconds to the target of each seed that was run.
        plain: The same of the plain runs.
    """
    for seed, seconds in own.items():
        base = plain[seed]
        if seconds is None or (base is not None and seconds >= base):
            return "lost"
    if set(own) < set(plain):
        return "not yet"
    means = [fmean(each for each in row.values() if each is not None) for row in (own, plain)]
    return "wins" if means[0] <= MOST_SHARE_OF_SECONDS * means[1] else "lost"


def _lay_out(records: Records) -> Iterator[Block]:
    yield Heading("Local steps: later outcomes, and parts that take turns", level=1)
    curves, seconds = read_curves(records), read_seconds(records.folder, "text")
    plain = curves[Variant()]
    if not plain or seconds is None:
        yield Paragraph("Nothing has been run.")
        return
    target = find_target(plain.values())
    yield Paragraph(
        f"Text, 1.07 million parameters, 8 workers, H = {FIRST}, `ScaledVote()`. Seconds to a test "
        f"loss of {target:.3f} are computed for links with {LATENCY_S * 1e3:.0f} ms of latency "
        "each way. [The protocol](../../studies/local-steps-protocol.md) was there before the "
        "runs. A variant must be sooner than the plain run of the same seed, on each seed of one "
        "link. All four were later with seed 1, so their other seeds were not run, and both "
        "options were removed."
    )
    rows = []
    for variant in ALL:
        verdicts, cells = [], []
        for link in LINKS:
            timed = [
                {
                    seed: time_variant(each, curve, target, seconds["seconds"][link])
                    for seed, curve in curves[each].items()
                }
                for each in (variant, Variant())
            ]
            verdicts.append(judge(*timed))
            cells.append(_describe(timed[0]))
        ends = [curve[-1][1] for curve in curves[variant].values()]
        verdict = "" if variant == Variant() else "wins" if "wins" in verdicts else verdicts[0]
        rows.append([str(variant), str(len(ends)), f"{fmean(ends):.3f}", *cells, verdict])
    header = ["", "seeds", "last test loss", "10 Mbit/s, s", "100 Mbit/s, s", "verdict"]
    yield Table(header, rows)


def _describe(seconds: Mapping[int, float | None]) -> str:
    return ", ".join("not reached" if each is None else f"{each:.0f}" for each in seconds.values())
