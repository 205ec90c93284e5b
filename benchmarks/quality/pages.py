"""The report: answers first, then every comparison, then how methods were tuned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import study_path  # noqa: F401
from answers import Answer, Claim, list_answers, list_claims
from archive import Records
from cells import Choice, Find, choose_rate, list_open
from controls import CONTROL_P, N_CONTROLS, Control, list_controls
from design import PARTS, REPLIES, Part, choose_recipe, make_cell
from differences import Difference, Verdict, find_difference
from evidence import Ending
from lengths import list_shrinkages
from pictures import draw_distances
from reaching import ACCURACY, NEAR_NATS, list_reached
from settings import BASES, FAMILIES, MARGINS, OTHERS

from distlion_lab.report.document import (
    Block,
    Heading,
    Paragraph,
    Picture,
    Table,
    render_markdown,
)

NAME = "quality"
CONTROLS = "runs_on_device"
"""Folder of runs of a CPU that were made again on a device, below the results."""


def write_report(records: Records, folder: Path) -> Path:
    """Write ``quality.md`` and its picture, computed from the records and nothing else."""
    blocks = list(_lay_out(records.read, Records(folder / CONTROLS).read))
    for block in blocks:
        if isinstance(block, Picture):
            (folder / block.name).write_bytes(block.png)
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(blocks))
    return path


def _lay_out(find: Find, find_control: Find) -> Iterator[Block]:
    claims = list_claims(find)
    yield Heading("Is a vote as good as AdamW?", level=1)
    yield Paragraph(
        "Computed from `benchmarks/results/runs/` by `python benchmarks/quality`, by the "
        "[protocol](../../studies/quality-protocol.md) that was fixed before the runs. "
        "Lower is better: points of test error for images, nats a byte for text."
    )
    yield Heading("What it decides for the defaults")
    yield Table(
        ["question", "answer", "cells that count", "cells it leads", "cells against it"],
        [row_of_answer(each) for each in list_answers(claims)],
    )
    yield Paragraph(
        "Six of the first question's 12 cells were known when its rule was written, from the "
        "[first study](../../studies/protocol.md): `text-small-1k` with 4 and 8 workers, "
        "`images-3` with 4, 8 and 32, and `images-10`. Of those, seeds 4 and 5 are new."
    )
    yield Heading("What has been run")
    header = ["part", "cells", "complete", "runs open", "runs reported", "of these on a GPU"]
    yield Table(header, list(rows_of_progress(find)))
    picture = draw_distances(claims)
    if picture is not None:
        caption = (
            "Distance of six methods to AdamW with 95 % confidence intervals, by parameters, steps "
            "and workers; a method whose interval lies in the grey band matches AdamW."
        )
        yield Picture(f"{NAME}.png", caption, picture)
    yield Heading("Comparisons")
    yield Paragraph(
        f"95 % confidence intervals. *Matches*: within {MARGINS['images']} points or "
        f"{MARGINS['text']} nats. *Leads* and *trails* pass a false discovery rate of 5 % over "
        "all rows that are complete."
    )
    yield Table(
        ["setting", "N", "data", "method - reference", "seeds", "difference", "interval", "p", ""],
        [row_of_claim(each) for each in claims if each.difference.n_seeds or is_final(each)],
    )
    yield from _lay_out_adamw(claims)
    yield from _lay_out_lengths(find)
    yield from _lay_out_reached(find)
    yield from _lay_out_replies(find)
    yield from _lay_out_controls(list(list_controls(find, find_control)))
    yield Heading("Tuning")
    yield Paragraph(
        "With 4 workers, at the shortest setting of each task. A family has a rate, betas and "
        "decay to tune, a method without a family its rate alone."
    )
    yield Table(
        ["task", "family", "runs", "name", "rate", "validation loss", "runs of this name"],
        list(_rows_of_tuning(find)),
    )


def _lay_out_controls(controls: Sequence[Control]) -> Iterator[Block]:
    if controls:
        yield Heading("Runs on a GPU beside the same runs on a CPU")
        yield Paragraph(
            "Some runs were made on a GPU. Here are some that were made on both, with the same "
            "rates and seeds, in float32. They differ in rounding and in the version of torch. "
            + _judge_controls(controls)
        )
        header = ["setting", "method", "seeds", "GPU - CPU", "interval", "p"]
        yield Table(header, [_row_of_control(each) for each in controls])


def _lay_out_adamw(claims: Sequence[Claim]) -> Iterator[Block]:
    yield Heading("AdamW itself")
    yield Paragraph("Mean outcome on the test data of AdamW on the mean gradient, even data.")
    yield Table(["setting", "method", "seeds", "outcome"], list(_rows_of_adamw(claims)))


def _rows_of_adamw(claims: Sequence[Claim]) -> Iterator[list[str]]:
    """Yield a row for each setting in which a method stands beside AdamW on even data."""
    shown: set[tuple[str, str]] = set()
    for claim in claims:
        end = claim.difference.reference
        key, is_even = (claim.setting, end.cell.method), end.cell.alpha is None
        if key in shown or not is_even or end.cell.attackers or "adamw" not in end.cell.method:
            continue
        shown.add(key)
        outcomes = end.outcomes()
        if outcomes:
            yield [*key, str(len(outcomes)), f"{fmean(outcomes):.3f}"]


def _lay_out_lengths(find: Find) -> Iterator[Block]:
    found = list(list_shrinkages(find))
    if not found:
        return
    yield Heading("Does the distance to AdamW shrink with length?")
    yield Paragraph(
        "The distance in shorter runs minus that in longer ones, seed by seed, in nats, with "
        "95 % confidence intervals. This table was thought of after the runs. It is none of the "
        "claims."
    )
    yield Table(
        ["shorter", "longer", "method", "seeds", "smaller by", "interval"],
        [
            [
                each.shorter,
                each.longer,
                each.method,
                str(each.n_seeds),
                f"{each.mean:+.4f}",
                f"{each.low:+.4f} to {each.high:+.4f}",
            ]
            for each in found
        ],
    )


def _lay_out_reached(find: Find) -> Iterator[Block]:
    reached = list(list_reached(find))
    if not reached:
        return
    yield Heading("Steps to a close target")
    yield Paragraph(
        f"On images {ACCURACY:.0%} validation accuracy. On text {NEAR_NATS} nats above the last "
        "validation loss of AdamW. Mean and range over seeds, on straight lines between scores. "
        "This table was thought of when the curves were known. It is none of the claims."
    )
    yield Table(
        ["setting", "target", "method", "steps"],
        [[each.setting, f"{each.target:.4g}", each.method, each.describe()] for each in reached],
    )


def _lay_out_replies(find: Find) -> Iterator[Block]:
    three_values, coin = (Ending.find(cell, find) for cell in REPLIES.list_cells(find))
    found = find_difference(coin, three_values)
    if not found.n_seeds or coin.choice.rate is None or three_values.choice.rate is None:
        return
    yield Heading("One bit or two in the reply, after the mask at the counter")
    yield Paragraph(
        f"Text, {coin.cell.workers} workers, {found.n_seeds} seeds: with a coin for elements that "
        f"the mask holds, one bit down, minus staying where they are, two bits down: "
        f"{found.mean:+.3f} nats, {found.low:+.3f} to {found.high:+.3f}. The rates were "
        f"{coin.choice.rate:g} and {three_values.choice.rate:g}. This is none of the comparisons "
        "above."
    )


def is_final(claim: Claim) -> bool:
    """Return whether a claim has a verdict."""
    return claim.difference.verdict is not Verdict.OPEN


def row_of_answer(answer: Answer) -> list[str]:
    """Return question, answer, and how many cells stand behind it."""
    against = [f"{each.setting}, N = {each.cell.workers}" for each in answer.failing]
    counts = [str(len(answer.claims)), str(answer.n_leading)]
    return [answer.question, answer.text, *counts, "; ".join(against) or "none"]


def rows_of_progress(find: Find, parts: Sequence[Part] = PARTS) -> Iterator[list[str]]:
    """Yield cells and runs of each part."""
    for part in parts:
        cells = part.list_cells(find)
        n_open = [len(list_open(cell, find)) for cell in cells]
        n_wanted = len(part.list_wanted(find))
        complete = sum(not each for each in n_open)
        runs = {
            record["name"]: "device" in record
            for cell in cells
            for record in Ending.find(cell, find).records.values()
        }
        counts = (len(cells), complete, sum(n_open) + n_wanted, len(runs), sum(runs.values()))
        yield [part.name, *map(str, counts)]


def row_of_claim(claim: Claim) -> list[str]:
    """Return where a comparison was made, the difference, and the verdict."""
    difference = claim.difference
    cell, reference = claim.cell, difference.reference.cell
    data = "even" if cell.alpha is None else f"alpha {cell.alpha:g}"
    if cell.attackers:
        data = f"{cell.attackers} x {cell.factor:g}"
    workers = cell.workers or reference.workers
    return [
        claim.setting,
        str(workers) if workers else "any",
        data,
        f"{cell.method} - {reference.method}",
        str(difference.n_seeds),
        *_show(difference),
        difference.verdict.value,
    ]


def _row_of_control(control: Control) -> list[str]:
    difference = control.difference
    method = difference.method.cell.method
    return [control.setting, method, str(difference.n_seeds), *_show(difference)]


def _judge_controls(controls: Sequence[Control]) -> str:
    """Apply the protocol's rule: no p-value below 0.05 / 6."""
    lowest = min(control.difference.p for control in controls)
    limit = CONTROL_P / N_CONTROLS
    if len(controls) < N_CONTROLS:
        return f"{len(controls)} of {N_CONTROLS} comparisons are there."
    if lowest < limit:
        return (
            f"The smallest p-value is {lowest:.2g}, below {limit:.2g}: no run on a GPU counts "
            "until the cause is known."
        )
    return (
        f"The smallest p-value is {lowest:.2g}, not below {limit:.2g}: no difference is detected. "
        "Differences within the intervals cannot be excluded."
    )


def _show(difference: Difference) -> Sequence[str]:
    """Return difference, interval and p-value."""
    digits = 2 if difference.method.cell.setting.task == "images" else 4
    if math.isinf(difference.mean):
        return ["diverged" if difference.mean > 0 else "the reference diverged", "", ""]
    shown = [f"{value:+.{digits}f}" for value in (difference.mean, difference.low, difference.high)]
    interval = "" if math.isnan(difference.low) else f"{shown[1]} to {shown[2]}"
    return [shown[0], interval, f"{difference.p:.2g}"]


def _rows_of_tuning(find: Find) -> Iterator[list[str]]:
    for task, setting in BASES.items():
        for family in FAMILIES:
            recipe = choose_recipe(family, task, find)
            runs = sum(len(choice.losses) for choice in recipe.trials.values())
            for name, choice in recipe.trials.items():
                chosen = " (chosen)" if name == recipe.method else ""
                if choice.rate is not None:
                    yield [task, family, str(runs), f"{name}{chosen}", *describe_choice(choice)]
        for name in OTHERS:
            choice = choose_rate(make_cell(setting, name), find)
            if choice.rate is not None:
                yield [task, "", str(len(choice.losses)), name, *describe_choice(choice)]


def describe_choice(choice: Choice) -> list[str]:
    """Return the rate, its validation loss, and how many rates were tried."""
    assert choice.rate is not None  # the caller asked before
    mark = " (at the edge)" if choice.at_edge else ""
    return [f"{choice.rate:g}{mark}", f"{choice.losses[choice.rate]:.4f}", str(len(choice.losses))]
