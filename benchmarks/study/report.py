"""The report of the study, from whatever records are there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from archive import Records
from cells import SEEDS, list_open
from claims import CLAIMS, SHOWN, Claim, Study, holds
from decisions import list_decisions
from evidence import MARGINS, UNITS, Comparison, Ending, Verdict
from figures import describe, draw_bits, draw_curves, draw_endings
from plan import PARTS, SHORT, Part

from distlion_lab.report.document import (
    Block,
    Heading,
    Paragraph,
    Picture,
    Table,
    render_markdown,
)

_FIGURES = (
    (draw_endings, "endings", "Outcome on test data: a stroke for each seed, a dot for the mean."),
    (draw_bits, "bits", "Outcome against bits up and down; lower left is better."),
    (draw_curves, "curves", "Validation loss over steps, the mean of the seeds."),
)
_DIVERGED = {Verdict.TRAILS: "diverged", Verdict.LEADS: "the reference diverged"}
_REFERENCES = ("global-adamw", "global-lion", "majority", SHORT)


def write_report(records: Records, folder: Path) -> Path:
    """Write ``study.md`` and its figures, computed from the records and nothing else."""
    study = Study(records.read)
    blocks = list(_lay_out(study, records))
    for block in blocks:
        if isinstance(block, Picture):
            (folder / block.name).write_bytes(block.png)
    path = folder / "study.md"
    path.write_text(render_markdown(blocks))
    return path


def _lay_out(study: Study, records: Records) -> Iterator[Block]:
    yield Heading("The study: results so far", level=1)
    yield Paragraph(_introduce(records))
    yield _table_of_progress(records, study)
    yield Heading("Claims")
    yield Paragraph(
        "A difference is the method's result minus the reference's: mean ± standard deviation "
        "over seeds, in points of test error for images and nats a byte for text. The protocol "
        "decides by one-sided 95 % bounds. Its older words read *matches*, *leads*, *trails* and "
        "*inconclusive* here. A match has an upper bound below "
        f"{MARGINS['images']:g} point or {MARGINS['text']:g} nats."
    )
    yield Table(
        ["claim", "of", "part", "N", "method - reference", "difference", "bounds", "answer"],
        [row for claim in CLAIMS for row in _rows_of_claim(claim, study)],
    )
    yield Heading("What it decides for the library")
    yield Table(["question", "what must hold", "answer"], list(_rows_of_decisions(study)))
    yield Heading("What the papers show")
    yield Table(["of", "what", "here", "status"], list(_rows_of_shown(study)))
    yield Heading("Figures")
    for draw, name, caption in _FIGURES:
        png = draw(study)
        if png is not None:
            yield Picture(f"study_{name}.png", caption, png)
    for part in PARTS:
        if any(each.records or each.choice.losses for each in study.endings[part.name]):
            yield from _lay_out_part(part, study)


def _introduce(records: Records) -> str:
    cells = [cell for part in PARTS for cell in part.cells]
    # Another study keeps its records in the same folder, some of them from a GPU.
    on_cpus = [each for each in records.read_all() if "device" not in each]
    found = [each for each in on_cpus if any(cell.has_made(each) for cell in cells)]
    hours = sum(record["cpu_s"] for record in found) / 3600
    dirty = sum(record["dirty"] for record in found)
    places = sorted({f"{record['cpu']}, torch {record['versions']['torch']}" for record in found})
    return (
        f"{len(found)} runs took {hours:.1f} core-hours on {'; '.join(places) or 'nothing yet'}. "
        f"In {dirty} of them sources were not committed. `python benchmarks/study` computes this "
        "page from `benchmarks/results/runs/`, by the rules of the "
        "[protocol](../../studies/protocol.md). `not yet run` marks a comparison with "
        "too few seeds for the protocol."
    )


def _table_of_progress(records: Records, study: Study) -> Block:
    rows = []
    for part in PARTS:
        endings = study.endings[part.name]
        whole = [each for each in endings if each.is_whole]
        waiting = [describe(each) for each in endings if not each.is_whole]
        n_open = sum(len(list_open(cell, records.read)) for cell in part.cells)
        rows.append(
            [
                part.name,
                f"{len(whole)} of {len(endings)}",
                str(n_open),
                ", ".join(waiting) or "nothing",
            ]
        )
    return Table(["part", "cells done", "runs that can be made now", "missing"], rows)


def _rows_of_claim(claim: Claim, study: Study) -> Iterator[list[str]]:
    answers = list(study.answer(claim))
    if not answers:
        answer = f"outside of this study: {claim.elsewhere}" if claim.elsewhere else "not tested"
        yield [claim.text, claim.source, "", "", "", "", "", answer]
    for part, comparison in answers:
        yield [
            claim.text,
            claim.source,
            part,
            _workers(comparison.method),
            f"{describe(comparison.method)} - {comparison.reference.cell.method}",
            _difference(comparison),
            _bounds(comparison),
            holds(claim, comparison),
        ]


def _rows_of_decisions(study: Study) -> Iterator[list[str]]:
    words = {True: "holds", False: "does not hold", None: "not yet run"}
    for decision in list_decisions(study):
        conditions = [f"{each.text} ({words[each.holds]})" for each in decision.conditions]
        yield [decision.question, "; ".join(conditions), decision.answer]


def _rows_of_shown(study: Study) -> Iterator[list[str]]:
    for source, what, parts, how in SHOWN:
        endings = [each for part in parts for each in study.endings[part]]
        n_whole = sum(each.is_whole for each in endings)
        status = f"{n_whole} of {len(endings)} cells done" if endings else "not in the study"
        yield [source, what, f"{', '.join(parts)}: {how}" if parts else how, status]


def _workers(ending: Ending) -> str:
    return str(ending.cell.workers) if ending.cell.workers else "any"


def _digits(ending: Ending) -> int:
    return 2 if ending.cell.setting.task == "images" else 4


def _difference(comparison: Comparison) -> str:
    if comparison.n_seeds == 0:
        return _DIVERGED.get(comparison.verdict, "")
    digits = _digits(comparison.method)
    text = f"{comparison.mean:+.{digits}f}"
    if comparison.n_seeds < len(SEEDS):
        return f"{text} ({comparison.n_seeds} of {len(SEEDS)} seeds)"
    return f"{text} ± {comparison.deviation:.{digits}f}"


def _bounds(comparison: Comparison) -> str:
    if math.isnan(comparison.lower) or comparison.n_seeds < len(SEEDS):
        return ""
    digits = _digits(comparison.method)
    return f"{comparison.lower:+.{digits}f} to {comparison.upper:+.{digits}f}"


def _lay_out_part(part: Part, study: Study) -> Iterator[Block]:
    endings = study.endings[part.name]
    task = part.cells[0].setting.task
    yield Heading(part.title)
    if all(cell.is_screened for cell in part.cells):
        yield from _lay_out_screen(endings, study)
        return
    yield Table(
        ["method", "N", "rate", "seeds", f"outcome, {UNITS[task]}", "bits up", "bits down"],
        [_row_of_ending(each) for each in endings],
    )
    rows = [row for each in endings for row in _rows_of_comparisons(part, each, study)]
    if rows:
        yield Table(["method", "reference", "difference", "bounds", "verdict"], rows)
    tuned = [each for each in endings if each.cell.tuned_as is None]
    if tuned:
        yield Heading("Validation loss by rate", level=3)
        yield Table(["method", "N", "rate: loss"], [_row_of_tuning(each) for each in tuned])
    yield Heading("Runs", level=3)
    yield Table(
        ["method", "records"],
        [[describe(each), ", ".join(f"`{name}`" for name in each.names)] for each in endings],
    )


def _lay_out_screen(endings: Sequence[Ending], study: Study) -> Iterator[Block]:
    """Show what tuning came to beside that of what all differ from: one seed, no test data."""
    rows = []
    for ending in endings:
        plain = study.find_beside(ending.cell, SHORT)
        assert plain is not None  # the plan has it for each task that is screened
        own, other = ending.validation_loss, plain.validation_loss
        known = own is not None and other is not None
        rows.append(
            [
                *(describe(ending), _workers(ending), _rate(ending)),
                "" if own is None else f"{own:.4f}",
                f"{own - other:+.4f}" if known else "",
                _row_of_tuning(ending)[-1],
            ]
        )
    loss = "best validation loss, 1 seed"
    yield Table(["method", "N", "rate", loss, f"minus that of {SHORT}", "rate: loss"], rows)


def _row_of_ending(ending: Ending) -> list[str]:
    outcomes, digits = ending.outcomes(), _digits(ending)
    row = [describe(ending), _workers(ending), _rate(ending), f"{len(outcomes)} of {len(SEEDS)}"]
    if not outcomes:
        return [*row, "diverged" if ending.has_diverged else "", "", ""]
    spread = f" ± {stdev(outcomes):.{digits}f}" if len(outcomes) > 1 else ""
    first = next(iter(ending.records.values()))
    bits = [f"{first[key]:.3g}" for key in ("bits_up", "bits_down")]
    lost = " (a seed diverged)" if ending.has_diverged else ""
    return [*row, f"{mean(outcomes):.{digits}f}{spread}{lost}", *bits]


def _rate(ending: Ending) -> str:
    if ending.choice.rate is None:
        return ""
    tuned = ending.cell
    while tuned.tuned_as is not None:
        tuned = tuned.tuned_as
    is_others = 0 < tuned.workers < ending.cell.workers
    marks = [" (edge)"] * ending.choice.at_edge + [f" (that of {tuned.workers})"] * is_others
    return f"{ending.choice.rate:g}{''.join(marks)}"


def _rows_of_comparisons(part: Part, ending: Ending, study: Study) -> Iterator[list[str]]:
    for reference in _REFERENCES:
        if reference == ending.cell.method:
            continue
        comparison = study.compare_cell(ending, part.name, reference)
        if comparison is None or not _difference(comparison):
            continue
        yield [
            describe(ending),
            reference,
            _difference(comparison),
            _bounds(comparison),
            comparison.verdict.value,
        ]


def _row_of_tuning(ending: Ending) -> list[str]:
    losses = [f"{rate:g}: {loss:.4f}" for rate, loss in sorted(ending.choice.losses.items())]
    return [ending.cell.method, _workers(ending), ", ".join(losses)]
