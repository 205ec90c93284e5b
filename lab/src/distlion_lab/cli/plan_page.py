"""A plan as one page of tables and curves that needs no other file and no network."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlion_lab.cli.plan_sites import MARK, tabulate_sites
from distlion_lab.cli.plan_table import choose_best, describe_setting, tabulate, write_call
from distlion_lab.errors import DataError
from distlion_lab.planning.advice import TIME_ONLY, Advice, build_record
from distlion_lab.planning.local_steps import advise_local
from distlion_lab.planning.planner import Forecasts
from distlion_lab.report.document import Code, Heading, Paragraph, Picture, Table, render_html
from distlion_lab.report.plan_figure import draw_plan_figure

_CAPTION = "Share of a step that is compute, against the link's rate and against the machines."


def write_plan_page(forecasts: Forecasts, advice: Advice, path: Path) -> None:
    """Write the page of a plan; an existing file is replaced.

    Raises:
        DataError: The page cannot be written.
    """
    scenario, curves = forecasts.scenario, io.BytesIO()
    draw_plan_figure(build_record(forecasts, advice), curves)
    head, rows = tabulate(forecasts, choose_best(forecasts.ranked))
    call = [Code(write_call(scenario, forecasts.best_vote))] if advice.compress else []
    regimes = [Paragraph(f"MajorityVote() is {regime.describe()}.") for regime in advice.regimes]
    page = render_html(
        [
            Heading("Should you compress? The plan of distlion", level=1),
            Paragraph(describe_setting(scenario)),
            Paragraph(advice.text),
            *call,
            *regimes,
            Heading("The best exchange of each method"),
            Table([name.replace("\n", " ") for name in head], rows),
            Picture("plan.png", _CAPTION, curves.getvalue()),
            Heading("Votes every few steps"),
            Paragraph(advise_local(scenario).text),
            Paragraph("Seconds of a step, by the link between sites:"),
            Table(*tabulate_sites(scenario)),
            Paragraph(MARK),
            Heading("Assumptions"),
            Table(["what", "value"], [list(pair) for pair in _flatten(scenario.to_json())]),
            Paragraph(TIME_ONLY),
        ]
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"page {str(path)!r} cannot be written: {error.strerror}") from error


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            yield f"{prefix}{name}", shown
