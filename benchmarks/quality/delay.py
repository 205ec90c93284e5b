"""Votes that are committed a step late: what they lose at equal steps, and win in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import study_path  # noqa: F401
from archive import Records
from cells import Cell, Find
from crossing import cross, find_column
from delayed import DELAYED
from design import Part, make_cell
from differences import Difference, find_difference
from evidence import Ending
from pages import rows_of_progress
from settings import CAUTIOUS, MOST_SEEDS, ORTHOGONAL, SETTINGS

from distlion_lab.report.document import Block, Heading, Paragraph, Table, render_markdown

NAME = "delay"
FORMS = {"orthogonalized": ORTHOGONAL, "cautious": CAUTIOUS}
_IMAGE_DECAY = "-decay-025"
"""Of orthogonalized votes on images: the recipe that tuning chose."""


def _methods(task: str) -> tuple[str, ...]:
    decay = _IMAGE_DECAY if task == "images" else ""
    own = (f"{ORTHOGONAL}{decay}", CAUTIOUS)
    return (*own, *(f"{DELAYED}{name}" for name in own))


def _part(name: str, setting: str, workers: int) -> Part:
    task = SETTINGS[setting].task
    return Part(name, (setting,), (workers,), methods=_methods(task), seeds=MOST_SEEDS)


DELAY_PARTS = (
    _part("delay-text", "text-small-1k", 4),
    _part("delay-images", "images-3", 4),
    _part("delay-text-8", "text-small-1k", 8),
    _part("delay-text-longer", "text-small-4k", 4),
    _part("delay-images-8", "images-3", 8),
    _part("delay-images-longer", "images-10", 4),
)
"""In the order of the protocol, which ends for a form of votes at the first cell that fails."""

MOST_LOST = {"text": 0.01, "images": 0.3}
TARGET_SHARE = 0.8
COMPUTE_S, PARAMETERS, HOSTS = 0.7, 124e6, 4
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}


@dataclass(frozen=True)
class Outcome:
    """A form of votes in one cell, late beside in time.

    Attributes:
        part, form: Which one.
        difference: Late minus in time, at equal steps.
        shares: Seconds to the target beside those of votes in time, for each link; None where a
            seed does not reach it.
    """

    part: str
    form: str
    difference: Difference
    shares: dict[str, float | None]

    @property
    def passes(self) -> bool:
        """True if late votes lose at most ``MOST_LOST``, and save time on at least one link."""
        most = MOST_LOST[self.difference.method.cell.setting.task]
        known = [share for share in self.shares.values() if share is not None]
        return self.difference.mean <= most and bool(known) and min(known) < 1


def exchange_seconds(rate_bit_per_s: float) -> float:
    """Return the seconds of both directions of one bit a parameter, over a worker's link."""
    return 2 * PARAMETERS * (HOSTS - 1) / HOSTS / rate_bit_per_s


def list_outcomes(find: Find) -> list[Outcome]:
    """List the cells whose runs are all there, in the order of the protocol."""
    found = []
    for part in DELAY_PARTS:
        for form, method in FORMS.items():
            name = next(each for each in part.methods if each.startswith(method))
            cells = [_make(part, each) for each in (f"{DELAYED}{name}", name)]
            late, in_time = (Ending.find(cell, find) for cell in cells)
            difference = find_difference(late, in_time)
            if difference.is_whole:
                shares = {link: _share(late, in_time, rate) for link, rate in LINKS.items()}
                found.append(Outcome(part.name, form, difference, shares))
    return found


def _make(part: Part, method: str) -> Cell:
    (setting,), (workers,) = part.settings, part.workers
    return make_cell(setting, method, workers)


def _share(late: Ending, in_time: Ending, rate_bit_per_s: float) -> float | None:
    """Return late votes' seconds to a target divided by those of votes in time."""
    task = in_time.cell.setting.task
    curves = [[each["validation"] for each in end.records.values()] for end in (late, in_time)]
    if late.has_diverged or in_time.has_diverged:
        return None
    wanted = TARGET_SHARE * in_time.cell.setting.steps
    target = fmean(
        next(row[find_column(task)] for row in curve if row[0] >= wanted) for curve in curves[1]
    )
    steps = [[cross(curve, task, target) for curve in each] for each in curves]
    if any(each is None for each in (*steps[0], *steps[1])):
        return None
    late_steps, steps_in_time = (fmean(each for each in row if each is not None) for row in steps)
    exchange_s = exchange_seconds(rate_bit_per_s)
    return late_steps * max(COMPUTE_S, exchange_s) / (steps_in_time * (COMPUTE_S + exchange_s))


def decide(outcomes: Sequence[Outcome], form: str) -> str:
    """Return whether this form of votes gets the option."""
    own = {each.part: each.passes for each in outcomes if each.form == form}
    if not all(own.values()):
        return "no"
    return "yes" if len(own) == len(DELAY_PARTS) else "not yet"


def write_delay_report(records: Records, folder: Path) -> Path:
    """Write ``delay.md``, computed from the records and nothing else."""
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(list(_lay_out(records.read))))
    return path


def _lay_out(find: Find) -> Iterator[Block]:
    outcomes = list_outcomes(find)
    yield Heading("Votes that are committed a step late", level=1)
    yield Paragraph(
        "Computed from `benchmarks/results/runs/` by `python benchmarks/quality`, by the "
        "[protocol](../../studies/delay-protocol.md) that was fixed before the runs. Lower is "
        "better: nats a byte for text, points of test error for images."
    )
    yield Heading("Does it become an option?")
    yield Table(["votes", "answer"], [[form, decide(outcomes, form)] for form in FORMS])
    yield Heading("Cells")
    header = ["cell", "votes", "lost at equal steps", "95 % interval"]
    header += [f"seconds to the target at {link}" for link in LINKS]
    yield Table([*header, "passes"], [_row(each) for each in outcomes])
    yield Heading("What has been run")
    header = ["part", "cells", "complete", "runs open", "runs reported", "of these on a GPU"]
    judged = {each.part for each in outcomes}
    left = {part.name for part in leave_out_failed(DELAY_PARTS, find) if part.methods}
    parts = [part for part in DELAY_PARTS if part.name in judged | left]
    yield Table(header, list(rows_of_progress(find, parts)))
    if len(parts) < len(DELAY_PARTS):
        yield Paragraph("Other cells are not run, as each form of votes has failed in one.")


def _row(each: Outcome) -> list[str]:
    difference = each.difference
    seconds = [
        "not reached by all seeds" if share is None else f"{share:.2f} of votes in time"
        for share in each.shares.values()
    ]
    interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
    row = [f"`{each.part}`", each.form, f"{difference.mean:+.4f}", interval, *seconds]
    return [*row, "yes" if each.passes else "no"]


def leave_out_failed(parts: Sequence[Part], find: Find) -> tuple[Part, ...]:
    """Return parts without the forms of votes that have failed in a cell of this study."""
    outcomes = list_outcomes(find)
    failed = [method for form, method in FORMS.items() if decide(outcomes, form) == "no"]
    return tuple(
        replace(part, methods=_leave_out(part.methods, failed)) if part in DELAY_PARTS else part
        for part in parts
    )


def _leave_out(methods: Sequence[str], failed: Sequence[str]) -> tuple[str, ...]:
    gone = tuple(failed)
    return tuple(name for name in methods if not name.removeprefix(DELAYED).startswith(gone))
