"""The planner as one page of sliders and curves that needs no other file and no network."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from distlion_lab.errors import DataError

_FOLDER = "page"


def write_plan_page(
    scenario: dict[str, Any], model: dict[str, Any], page_path: Path, *, threshold: float
) -> None:
    """Write the planner's page.

    Args:
        scenario: Initial values of the sliders, and assumptions without a slider, from
            ``Scenario.to_json``.
        model: Model from ``distlion_lab.planning.build_page_model``.
        page_path: Path of the page; an existing file is replaced.
        threshold: Gain from which compression is advised.

    Raises:
        DataError: The page cannot be written.
    """
    plan = {"scenario": scenario, "model": model, "threshold": threshold}
    page = _read("page.html")
    for place, text in (
        # Text in the data must not end the element that holds it.
        ("__PLAN__", json.dumps(plan, allow_nan=False).replace("<", "\\u003c")),
        ("__PLANNER__", _read("planner.js")),
        ("__PAGE__", _read("page.js")),
    ):
        page = page.replace(place, text)
    try:
        page_path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"page {str(page_path)!r} cannot be written: {error.strerror}") from error


def _read(name: str) -> str:
    return (files("distlion_lab.report") / _FOLDER / name).read_text(encoding="utf-8")
