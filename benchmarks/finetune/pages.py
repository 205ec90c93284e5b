"""The report, from the records and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import study_path  # noqa: F401
from answers import (
    Claim,
    FirstTry,
    choose_factor,
    judge_aim,
    list_claims,
    list_first_tries,
)
from archive import Records
from cells import Find, choose_rate
from design import PARTS
from evidence import NOVELS, Ending
from settings import ADAMW, FACTORS, METHODS, ONE_BIT, VOTES

from distlion_lab.report.document import Block, Heading, Paragraph, Table, render_markdown

NAME = "finetune"


def write_report(records: Records, folder: Path) -> Path:
    """Write ``finetune.md``."""
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(list(lay_out(records.read))))
    return path


def lay_out(find: Find) -> Iterator[Block]:
    """Lay out the report."""
    claims, tries = list_claims(find), list_first_tries(find)
    yield Heading("Fine-tuning with votes", level=1)
    yield Paragraph(
        f"Computed from `benchmarks/results/{NAME}/` by `python benchmarks/{NAME}`, by the "
        f"[protocol](../../studies/{NAME}-protocol.md) that was fixed before the runs. "
        "Differences are points of test error, on novels nats a token, a method's minus AdamW's: "
        "lower is better."
    )
    yield Heading("Within 0.3 points of AdamW on two of three tasks?")
    names = [name for name in METHODS if name != ADAMW]
    rows = [[name, "yes" if name in ONE_BIT else "no", judge_aim(claims, name)] for name in names]
    yield Table(["method", "one bit a step", "answer"], rows)
    yield Heading("First rate, as a factor of AdamW's best one")
    yield Table(["votes", "factor"], [[name, _advise(tries, name)] for name in (*VOTES, "all")])
    shown = [f"regret at {factor:g}" for factor in FACTORS]
    yield Table(["task", "votes", *shown], [_row_of_tries(each) for each in tries])
    yield Heading("Beside AdamW")
    yield Table(
        ["part", "setting", "method", "seeds", "difference", "95 % interval", "verdict"],
        [_row_of_claim(each) for each in claims if each.difference.n_seeds or _is_known(each)],
    )
    yield Heading("Rates")
    yield Table(
        ["part", "setting", "method", "rate", "beside AdamW's", "test error or nats"],
        list(_rows_of_rates(find)),
    )
    yield Heading("What has been run")
    header = ["part", "cells", "complete", "runs open now", "runs reported"]
    yield Table(header, list(_rows_of_progress(find)))


def _is_known(claim: Claim) -> bool:
    return math.isinf(claim.difference.mean)


def _advise(tries: Sequence[FirstTry], method: str) -> str:
    own = [each for each in tries if method in (each.method, "all")]
    whole = len(own) == len({each.task for each in own}) * (len(VOTES) if method == "all" else 1)
    factor = choose_factor(own) if whole else None
    return "not yet known" if factor is None else f"{factor:g}"


def _row_of_tries(each: FirstTry) -> list[str]:
    return [each.task, each.method, *(f"{each.regrets[factor]:.4f}" for factor in FACTORS)]


def _row_of_claim(claim: Claim) -> list[str]:
    difference = claim.difference
    digits = 4 if claim.setting in NOVELS else 2
    mean = f"{difference.mean:+.{digits}f}"
    if math.isinf(difference.mean):
        mean = "diverged" if difference.mean > 0 else "AdamW diverged"
    known = math.isfinite(difference.low)
    low, high = (f"{each:+.{digits}f}" for each in (difference.low, difference.high))
    interval = f"{low} to {high}" if known else ""
    where = [claim.part, claim.setting, claim.method, str(difference.n_seeds)]
    return [*where, mean, interval, difference.verdict.value]


def _rows_of_rates(find: Find) -> Iterator[list[str]]:
    for part in PARTS:
        if part.factors:
            continue
        for setting in part.settings:
            adamw = choose_rate(part.make_cell(setting, ADAMW), find).rate
            for method in part.methods:
                ending = Ending.find(part.make_cell(setting, method), find)
                rate, outcomes = ending.choice.rate, ending.outcomes()
                if rate is None or adamw is None:
                    continue
                mark = " (at the edge)" if ending.choice.at_edge else ""
                digits = 4 if setting in NOVELS else 2
                error = f"{math.fsum(outcomes) / len(outcomes):.{digits}f}" if outcomes else ""
                beside = f"{rate / adamw:g}"
                yield [part.name, setting, method, f"{rate:g}{mark}", beside, error]


def _rows_of_progress(find: Find) -> Iterator[list[str]]:
    for part in PARTS:
        cells = part.list_cells()
        endings = [Ending.find(cell, find) for cell in cells]
        n_open = len({run.name for run in part.list_open(find)})
        reported = sum(len(ending.records) for ending in endings)
        complete = sum(ending.is_whole for ending in endings)
        yield [part.name, *map(str, (len(cells), complete, n_open, reported))]
