"""Whoever types a name that does not exist hears which one was meant, whatever names it."""

import pytest
from typer.testing import CliRunner

from distlion_lab.cli import app

PLAN = "plan --params 1e9 --nodes 4 --link 10gbit --compute-s 1"
NEAR = [
    ("train --rule majorty", "majority"),
    ("train --rule quantized-9", "quantized-8"),
    ("train --rule globallion", "global-lion"),
    ("train --exchange allreduce", "all-reduce"),
    ("train --task txt", "text"),
    ("train --overlap onn", "on"),
    ("train --on-world-change meen", "mean"),
    ("compare --methods majorty", "majority"),
    ("compare --methods lioncub", "lion-cub"),
    ("compare --preset papr", "paper"),
    (f"{PLAN} --device a10", "a100"),
    (f"{PLAN} --node-link nvlnk", "nvlink"),
    ("trian", "train"),
]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train", ("majority-zero", "quantized-P", "global-adamw", "all-gather")),
        ("compare", ("majority-zero", "lion-cub", "terngrad")),
        ("plan", ("h200", "rtx4090", "nvlink")),
    ],
)
def test_help_lists_all_names_as_refusals_promise(command, names):
    shown = CliRunner(env={"COLUMNS": "60"}).invoke(app, [*command.split(), "--help"]).stdout
    text = "".join(shown.split())
    assert all(name in text for name in names)


@pytest.mark.parametrize(("words", "meant"), NEAR)
def test_unknown_name_is_answered_with_the_nearest(words, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"did you mean {meant}" in line.lower().replace("'", "")
    # Nobody finds a name in a list of thirty.
    assert line.count(",") <= 3
