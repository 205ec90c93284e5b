import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from comparisons import TINY_GPT
from distlion_lab.cli import app
from distlion_lab.cli.compare import _Display
from distlion_lab.training.compare import CompareProgress
from signals import hear_ctrl_c


def invoke(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return options of a comparison that takes seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text("".join(f"line {n} of a text\n" for n in range(200)))
    (folder / "config.json").write_text(json.dumps(TINY_GPT))
    data = ["--data", str(folder / "text.txt"), "--model-config", str(folder / "config.json")]
    return ["--task", "text", *data, "--steps", "4", "--batch-size", "1", "--jobs", "2"]


@pytest.fixture(scope="module")
def compared(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    few = ["--methods", "majority, global-lion", "--workers", "1,2", "--seeds", "1", "--lrs", "2"]
    return invoke(*tiny, *few, "--out", out, "--json"), out


def test_help_shows_an_example_and_the_methods():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Example: distlion compare" in result.stdout
    assert "quantized-P" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "majorty"], "--methods 'majorty' is unknown"),
        (["--methods", ","], "methods are none"),
        (["--workers", "4,many"], "--workers: 'many'"),
        (["--workers", "4,4"], "workers are 4, 4"),
        (["--seeds", "0"], "seeds is 0"),
        (["--lrs", "0"], "lrs is 0"),
        (["--link", "fast"], "rate 'fast'"),
        (["--jobs", "0"], "jobs is 0"),
    ],
)
def test_wrong_value_is_one_clear_line_and_exits_with_2(options, message, tmp_path):
    result = invoke("--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_missing_data_exits_with_1(tmp_path):
    result = invoke("--out", tmp_path / "out", "--data", "no-such-folder")
    assert result.exit_code == 1
    assert "no-such-folder" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--preset", "none"], ["--steps", "x"], ["--nonsense"]])
def test_usage_error_exits_with_2(options):
    assert invoke(*options).exit_code == 2


@pytest.mark.distributed
def test_folder_gets_records_report_and_figures(compared):
    result, out = compared
    assert result.exit_code == 0, result.stderr
    assert {"comparison.json", "report.html", "report.md", "steps.png"} <= {
        path.name for path in out.iterdir()
    }
    assert len(list((out / "runs").iterdir())) == 2 * 2 * (2 + 1)


@pytest.mark.distributed
def test_json_has_the_outcome_of_every_method(compared):
    result, out = compared
    shown = json.loads(result.stdout)
    assert shown["folder"] == str(out)
    assert {row["method"] for row in shown["outcome"]["2"]} == {"majority", "global-lion"}
    assert shown["outcome"]["2"][0]["diverged"] == "0 of 1"
    # One seed of four steps, and grids of two rates, of which either is an edge.
    few, edges = shown["warnings"]
    assert "1 seed and 4 steps" in few
    assert "majority with 2 workers" in edges
    assert {row["lr at the edge"] for row in shown["outcome"]["2"]} == {"yes"}


@pytest.mark.distributed
def test_progress_goes_to_standard_error(compared):
    assert "0/12 runs" in compared[0].stderr


@pytest.mark.distributed
def test_command_in_the_index_repeats_the_comparison_and_runs_nothing(compared):
    _, out = compared
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    command = json.loads((out / "comparison.json").read_text())["command"]
    words = shlex.split(command)
    assert words[:2] == ["distlion", "compare"]
    assert words[-2:] == ["--out", str(out)]
    assert "--json" not in words
    result = invoke(*words[2:])
    assert result.exit_code == 0, result.stderr
    assert "2 workers" in result.stdout
    assert result.stdout.count("\nwarning: ") == 2
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()} == before


@pytest.mark.distributed
def test_preset_and_quick_give_way_to_what_is_given(tiny, tmp_path):
    few = ["--methods", "majority", "--workers", "2", "--seeds", "1", "--lrs", "1"]
    result = invoke(*tiny, "--preset", "paper", "--quick", *few, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    settings = json.loads((tmp_path / "out" / "comparison.json").read_text())["settings"]
    assert (settings["methods"], settings["workers"]) == (["majority"], [2])
    assert (settings["steps"], settings["batch_size"], settings["seeds"]) == (4, 1, 1)
    assert settings["tuning_steps"] == 2


@pytest.mark.distributed
def test_ctrl_c_keeps_finished_runs_and_the_rest_follows(tiny, tmp_path):
    command = [sys.executable, "-m", "distlion", "compare", *tiny, "--methods", "majority"]
    command += ["--workers", "2", "--lrs", "1", "--jobs", "1", "--out", str(tmp_path / "out")]
    command += ["--seeds", "200", "--steps", "30"]
    runs = tmp_path / "out" / "runs"
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509
    ) as process:
        while process.poll() is None and len(list(runs.glob("*.json"))) < 2:
            time.sleep(0.05)
        # As a terminal does it: to the whole group.
        os.killpg(process.pid, signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 130, messages
    assert "interrupted" in messages
    finished = sorted(runs.glob("*.json"))
    assert 2 <= len(finished) < 200
    assert all(json.loads(path.read_text())["diverged"] is None for path in finished)
    result = invoke(*command[4:], "--seeds", "2")
    assert result.exit_code == 0, result.stderr
    assert sorted(runs.glob("*.json")) == finished


def make_progress(done, *, seconds_left=75.0):
    return CompareProgress(done, 10, done / 10, f"run {done}", seconds_left)


def show(*events, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with _Display(console) as display:
        for event in events:
            display(event)
    return console.file.getvalue()


def test_without_a_terminal_lines_are_sparse_and_tell_share_runs_and_time_left():
    lines = show(*map(make_progress, range(10))).splitlines()
    assert lines == ["  0%  0/10 runs  1:15 left  run 0"]


def test_hours_are_shown_as_such():
    assert "1:01:05 left" in show(make_progress(1, seconds_left=3665))


def test_terminal_gets_a_bar():
    assert "7/10 runs" in show(make_progress(7), terminal=True)
