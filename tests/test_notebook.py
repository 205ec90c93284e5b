"""The notebook in examples/ runs from top to bottom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/first_run.ipynb"


def read_code() -> str:
    """Return all code cells; what only IPython understands becomes ``pass``."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    lines = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return "\n".join(
        line.replace(line.lstrip(), "pass") if line.lstrip().startswith("%") else line
        for line in lines.splitlines()
    )


def test_the_notebook_shows_what_it_computed() -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    shown = [output for cell in cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert any("validation loss" in "".join(output.get("text", "")) for output in shown)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(read_code())
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "MPLBACKEND": "Agg"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "votes, lr" in done.stdout
    assert "1.00 bits up and 1.00 down" in done.stdout
