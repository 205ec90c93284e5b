"""The map of diagnostics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distlion_lab.errors import DataError
from distlion_lab.report import diagnosis_figure

ENTRIES = [
    {"step": step, "parameter": name, "margin": value, "ties": 0.1, "agreement": 0.9,
     "coherence": 0.5}
    for step, name, value in [(0, "a", 0.2), (0, "b", 0.4), (10, "a", 0.6)]
]  # fmt: skip


def test_map_has_a_row_for_each_parameter_and_a_gap_where_nobody_voted() -> None:
    values = diagnosis_figure._arrange(ENTRIES, "margin", [0, 10], ["a", "b"])

    np.testing.assert_equal(values, [[0.2, 0.6], [0.4, np.nan]])


def test_figure_is_written(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.png"

    diagnosis_figure.draw_diagnosis_figure(ENTRIES, path, title="text, 4 workers")

    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("entries", [[], [{"step": 0, "parameter": "a"}]])
def test_nothing_or_something_else_is_refused(
    entries: list[dict[str, object]], tmp_path: Path
) -> None:
    with pytest.raises(DataError):
        diagnosis_figure.draw_diagnosis_figure(entries, tmp_path / "x.png", title="")
