"""The report on orthogonalized votes: answers first, then rates, then every comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import study_path  # noqa: F401
from archive import Records
from cells import Find, choose_rate
from design import choose_recipe, make_cell
from orthogonal_answers import (
    FACTORS,
    MOST_DRIFT,
    MOST_LOST_NATS,
    RateCell,
    WidthRates,
    choose_factor,
    decide_every,
    decide_fan_in,
    decide_recipe,
    list_every,
    list_orthogonal_claims,
    list_rate_cells,
    list_width_rates,
)
from orthogonal_design import ORTHOGONAL_PARTS
from pages import describe_choice, is_final, row_of_answer, row_of_claim, rows_of_progress
from pictures import draw_distances
from settings import BASES, CAUTIOUS, MATRIX_FAMILIES, MUON, MUON_SIGN, ORTHOGONAL, SHORT

from distlion_lab.report.document import (
    Block,
    Heading,
    Paragraph,
    Picture,
    Table,
    render_markdown,
)

NAME = "orthogonal"
_SHOWN = {
    ORTHOGONAL: "votes, hidden matrices orthogonalized",
    CAUTIOUS: "votes, cautious (the recipe)",
    SHORT: "votes, without the mask",
    MUON: "Muon and AdamW on the mean gradient",
    MUON_SIGN: "sign of Muon's direction on the mean gradient",
}


def write_orthogonal_report(records: Records, folder: Path) -> Path:
    """Write ``orthogonal.md`` and its picture, computed from the records and nothing else."""
    blocks = list(_lay_out(records.read))
    for block in blocks:
        if isinstance(block, Picture):
            (folder / block.name).write_bytes(block.png)
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(blocks))
    return path


def _lay_out(find: Find) -> Iterator[Block]:
    claims = list_orthogonal_claims(find)
    yield Heading("Do votes on orthogonalized directions lead AdamW?", level=1)
    yield Paragraph(
        "Computed from `benchmarks/results/runs/` by `python benchmarks/quality`, by the "
        "[protocol](../../studies/orthogonal-protocol.md) that was fixed before the runs. "
        "Lower is better: nats a byte for text, points of test error for images."
    )
    yield Heading("What it decides for the recipe")
    yield Table(
        ["question", "answer", "cells that count", "cells it leads", "cells against it"],
        [row_of_answer(decide_recipe(claims))],
    )
    yield from _lay_out_rates(find)
    yield from _lay_out_every(find)
    yield Heading("What has been run")
    header = ["part", "cells", "complete", "runs open", "runs reported", "of these on a GPU"]
    yield Table(header, list(rows_of_progress(find, ORTHOGONAL_PARTS)))
    picture = draw_distances(claims, _SHOWN)
    if picture is not None:
        caption = (
            "Distance to AdamW with 95 % confidence intervals, by parameters, steps and workers; "
            "a method whose interval lies in the grey band matches AdamW."
        )
        yield Picture(f"{NAME}.png", caption, picture)
    yield Heading("Comparisons")
    yield Paragraph(
        "95 % confidence intervals. *Leads* and *trails* pass a false discovery rate of 5 % over "
        "all rows that are complete."
    )
    yield Table(
        ["setting", "N", "data", "method - reference", "seeds", "difference", "interval", "p", ""],
        [row_of_claim(each) for each in claims if each.difference.n_seeds or is_final(each)],
    )
    yield Heading("Tuning")
    yield Paragraph("With 4 workers, at the shortest setting of each task.")
    yield Table(
        ["task", "family", "name", "rate", "validation loss", "runs of this name"],
        list(_rows_of_tuning(find)),
    )


def _lay_out_rates(find: Find) -> Iterator[Block]:
    cells = list_rate_cells(find)
    if not cells:
        return
    yield Heading("Learning rate")
    yield Paragraph(
        "Validation loss of orthogonalized votes at a factor of AdamW's best rate, less the lowest "
        "one of the cell, in nats. *Not tried* is farther from the best rate than what was tried. "
        + _describe_factor(choose_factor(cells))
    )
    yield Table(
        ["setting", "N", "AdamW's rate", "best rate", *(f"x {each:g}" for each in FACTORS)],
        [_row_of_rates(each) for each in cells],
    )
    found = list_width_rates(find)
    if any(each.rates for each in found):
        yield Paragraph(
            "Best rates by width, GPT of 2 layers, 300 steps. A factor by fan-in becomes part of "
            f"the recipe if it keeps them within a factor of {MOST_DRIFT:g} and they are not "
            f"without it: {decide_fan_in(*found)}."
        )
        widths = sorted({width for each in found for width in each.rates})
        yield Table(
            ["method", *(f"width {width}" for width in widths)],
            [_row_of_widths(each, widths) for each in found],
        )


def _lay_out_every(find: Find) -> Iterator[Block]:
    found = list_every(find)
    if not found:
        return
    yield Heading("Orthogonalizing in some steps only")
    yield Paragraph(
        "`text-small-1k`, 4 workers, validation loss of one seed at the best rate. It becomes an "
        f"option if every second step loses at most {MOST_LOST_NATS:g} nats to every step: "
        f"{decide_every(found)}."
    )
    rows = [[each.method, f"{each.rate:g}", f"{each.loss:.4f}"] for each in found]
    yield Table(["method", "rate", "validation loss"], rows)


def _describe_factor(factor: float | None) -> str:
    if factor is None:
        return "No factor was tried in all cells."
    return f"The largest loss is the smallest with a factor of {factor:g}."


def _row_of_rates(cell: RateCell) -> list[str]:
    regrets = [
        "not tried" if math.isinf(cell.regrets[factor]) else f"{cell.regrets[factor]:.4f}"
        for factor in FACTORS
    ]
    return [cell.setting, str(cell.workers), f"{cell.adamw:g}", f"{cell.best:g}", *regrets]


def _row_of_widths(found: WidthRates, widths: Sequence[int]) -> list[str]:
    return [
        found.method,
        *(f"{found.rates[width]:g}" if width in found.rates else "" for width in widths),
    ]


def _rows_of_tuning(find: Find) -> Iterator[list[str]]:
    for task, setting in BASES.items():
        for family in ("adamw", *MATRIX_FAMILIES):
            recipe = choose_recipe(family, task, find)
            for name in recipe.trials:
                choice = choose_rate(make_cell(setting, name), find)
                chosen = " (chosen)" if name == recipe.method else ""
                if choice.rate is not None:
                    yield [task, family, f"{name}{chosen}", *describe_choice(choice)]
