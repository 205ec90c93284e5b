from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
N_PARAMS = 32768
OTHERS = ("eager", "eager as published", "eager by lerp", "foreach", "compiled", "lion-pytorch")
OURS = (
    "encode_signs + commit",
    "step_alone",
    "both streaming loops",
    "streaming loop of step_alone",
)
WORKERS = (4, 8, 64)
ROWS = {
    *(f"streaming loop / {op}" for op in ("encode_signs", "commit", "step_alone")),
    *(f"streaming loop of {op}, GB/s" for op in ("encode_signs", "commit", "step_alone")),
    *(f"{ours} / {other}" for ours, other in product(OURS, OTHERS)),
    "encode_signs + commit / compiled in two passes",
    *(f"encode_levels, l1, p = {p} / encode_signs" for p in (2, 4, 8)),
    *(f"{op}, N = {n} / step" for op, n in product(("count_signs", "count_ones"), WORKERS)),
    *(f"count_levels, p = {p}, N = {n} / step" for p, n in product((2, 4, 8), WORKERS)),
    "count_signs, N = 4, whole bucket / step",
    *(f"{op}, cautious / {op}" for op in ("encode_signs", "encode_ternary")),
    "encode_pairs / encode_ternary",
    *(f"count_pairs, one bit down, N = {n} / count_ternary" for n in WORKERS),
    "encode_signs of 300 x 1,000 / of one tensor",
    "gather of the 300 / encode_signs of one tensor",
    "encode_signs / packbits of ready booleans",
    "encode_signs / lerp, > 0 and packbits",
    "count_signs, N = 8 / torch.mode of unpacked votes",
    "count_signs, N = 8 / unpackbits and sum",
    "frame / copy and zlib.crc32",
    "frame, GB/s",
    "copy and zlib.crc32, GB/s",
    "digest, GB/s",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the program on few parameters; return where its results are."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, ROOT / "benchmarks/kernels", "--quick", "--threads", "1"]
    command += ["--params", str(N_PARAMS), "--results", folder]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "encode_signs" in ended.stdout
    return folder


@pytest.fixture(scope="module")
def rows(results: Path) -> list[dict[str, Any]]:
    """Return the rows of the JSON."""
    run = json.loads((results / "kernels.json").read_text())["runs"]["1"]
    return [row for group in run["groups"] for row in group["rows"]]


def test_every_row_is_in_the_json(rows: list[dict[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    assert len(names) == len(ROWS)
    assert set(names) == ROWS


def test_only_compiled_lions_are_left_out_of_a_quick_run(rows: list[dict[str, Any]]) -> None:
    missing = {row["name"] for row in rows if row["median"] is None}
    assert missing == {name for name in ROWS if "/ compiled" in name}
    assert all(0 < row["q1"] <= row["median"] <= row["q3"] for row in rows if row["median"])


def test_a_target_is_met_only_where_the_median_reaches_it(rows: list[dict[str, Any]]) -> None:
    judged = [row for row in rows if row["met"] is not None]
    assert {row["name"] for row in rows if row["target"] and row["median"]} == {
        row["name"] for row in judged
    }
    for row in judged:
        margin = row["target"] - row["median"]
        assert row["met"] == (margin <= 0 if row["at_least"] else margin >= 0), row


def test_the_conditions_are_in_the_json(results: Path) -> None:
    conditions = json.loads((results / "kernels.json").read_text())["conditions"]
    assert conditions["params"] == N_PARAMS
    expected = "date cpu cores torch compiler instruction_set repetitions threads"
    assert all(conditions[name] for name in expected.split())
    assert conditions["load_average_before"] >= 0


def test_markdown_says_what_the_json_says(results: Path, rows: list[dict[str, Any]]) -> None:
    lines = (results / "kernels.md").read_text().splitlines()
    for row in rows:
        (line,) = (line for line in lines if line.startswith(f"| {row['name']} |"))
        target, measured, met = (cell.strip() for cell in line.split("|")[2:5])
        assert bool(target) == (row["target"] is not None)
        assert met == {True: "yes", False: "NO", None: ""}[row["met"]]
        if row["median"] is None:
            assert measured == "not measured"
        else:
            # Three digits after the point below 1, one from 10 on: half of the last place.
            assert float(measured.split()[0]) == pytest.approx(row["median"], rel=5e-3, abs=5e-4)
