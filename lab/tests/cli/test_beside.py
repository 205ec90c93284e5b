import dataclasses
import json
import os
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from distlion.errors import InvalidArgumentError
from distlion_lab.cli import app
from distlion_lab.cli.beside import print_beside, print_next, settle_beside
from distlion_lab.report.loss_figure import draw_beside_figure
from distlion_lab.report.race import Lap
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import Overlap, TrainSettings
from run_records import make_record

SHORT = ("train", "--task", "images", "--steps", "2", "--batch-size", "4", "--eval-every", "1")


def make_run(rule, seconds, losses, sent, **settings):
    steps = [0, 5, 10]
    return make_record(
        settings={"task": "text", "rule": rule, "lr": 1e-3, "steps": 10, **settings},
        final_validation_loss=losses[-1],
        sent_bytes_per_worker=sent,
        evaluations={"step": steps, "seconds": seconds, "loss": losses},
    )


VOTES = make_run("majority", [0.0, 5.0, 10.0], [5.0, 3.0, 2.2], 10_000_000)
BASELINE = make_run("global-adamw", [0.0, 10.0, 20.0], [5.0, 2.8, 2.0], 320_000_000)
LOCAL = make_run("scaled", [0.0, 1.0, 2.0], [5.0, 3.0, 2.2], 10_000, every=8)


def show(first, second):
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as shown:
        print_beside(console, first, second)
    return shown.get()


def test_losses_are_told_after_equal_steps_and_in_equal_time():
    lines = show(VOTES, BASELINE).splitlines()
    cells = {line.split("  ")[0].strip(): line.split()[-2:] for line in lines if line.strip()}
    assert cells["validation loss"] == ["2.2000", "2.0000"]
    assert cells["... after 10 s on this machine"] == ["2.2000", "2.8000"]


def test_a_loss_between_two_validations_is_on_a_straight_line():
    # Otherwise a run that was validated long before would seem to stand still.
    assert "... after 2 s on this machine" in show(LOCAL, BASELINE)
    assert "4.5600" in show(LOCAL, BASELINE)  # a fifth of the way from 5.0 to 2.8


def test_bytes_are_told_as_seconds_of_a_link():
    text = show(VOTES, BASELINE)
    # 1 MB and 32 MB a step; 100 Mbit/s are 12.5 MB/s.
    assert "0.080 s" in text and "2.560 s" in text
    assert "sends 32.0x fewer bytes" in text


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (VOTES, BASELINE, "and sends 32.0x fewer bytes."),
        (BASELINE, VOTES, "and sends 32.0x as many bytes."),
        (make_run("majority", [0.0, 5.0, 10.0], [5.0, 3.0, 2.2], 0), VOTES, "and sends nothing."),
    ],
)
def test_who_sends_less_is_said(first, second, words):
    assert words in show(first, second)


def test_equal_losses_are_level():
    assert "majority matches majority" in show(VOTES, VOTES)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (VOTES, BASELINE, "majority trails global-adamw by 10.0%"),
        (BASELINE, VOTES, "global-adamw leads majority by 9.1%"),
    ],
)
def test_who_is_behind_is_said(first, second, words):
    assert words in show(first, second)


def show_next(first, second):
    console = Console(width=200)
    with console.capture() as shown:
        print_next(console, first, second)
    return shown.get()


def test_next_commands_name_what_was_trained():
    assert "--task text --methods majority,global-adamw" in show_next(VOTES, BASELINE)


def test_next_commands_run_where_they_are_shown(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/opt/venv/bin/distlion", "train"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "/opt/venv/bin/distlion plan" in show_next(VOTES, BASELINE)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/distlion")
    assert "  distlion plan" in show_next(VOTES, BASELINE)


def test_local_steps_are_named_as_those_who_compare_know_them():
    assert "scaled every 8 steps trails" in show(LOCAL, BASELINE)
    (methods,) = re.findall(r"--methods (\S+)", show_next(LOCAL, BASELINE))
    assert methods == "local-8-scaled-plain,global-adamw"
    assert [find_method(name).name for name in methods.split(",")] == methods.split(",")


def test_a_baseline_beside_votes_has_none_of_their_options():
    first = TrainSettings.with_defaults(
        rule="majority", overlap=Overlap.ON, exchange="all-gather", momentum_sync_every=5, lr=1.0
    )
    second = settle_beside(first, "global-adamw", None)
    assert (second.exchange, second.overlap, second.momentum_sync_every) == (
        "auto",
        Overlap.OFF,
        None,
    )
    assert second.lr == second.method.train_lr
    kept = {"task", "workers", "steps", "seed", "batch_size", "data", "partition", "schedule"}
    for name in kept:
        assert getattr(second, name) == getattr(first, name)


def test_votes_beside_votes_keep_their_options():
    first = TrainSettings.with_defaults(rule="majority", overlap=Overlap.ON, exchange="all-gather")
    second = settle_beside(first, "quantized-2", 3e-3)
    assert dataclasses.replace(first, rule="quantized-2", lr=3e-3) == second


def test_a_rule_that_is_unknown_is_refused():
    with pytest.raises(InvalidArgumentError, match="did you mean global-adamw"):
        settle_beside(TrainSettings.with_defaults(), "global-adam", None)


def test_figure_has_both_runs(tmp_path):
    draw_beside_figure([VOTES.to_json(), BASELINE.to_json()], tmp_path / "both.png")
    draw_beside_figure([VOTES.to_json(), VOTES.to_json()], tmp_path / "one.png")
    laps = [Lap("100mbit", "measured", ([0.0, 1.0, 2.0], [0.0, 3.0, 6.0]))]
    draw_beside_figure([VOTES.to_json(), BASELINE.to_json()], tmp_path / "race.png", laps)
    silent = make_run("majority", [0.0, 5.0, 10.0], [5.0, 3.0, 2.2], 0)
    draw_beside_figure([silent.to_json(), BASELINE.to_json()], tmp_path / "silent.png")
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "one.png").read_bytes()
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "race.png").read_bytes()


@pytest.mark.distributed
def test_a_second_run_is_trained_and_races_beside_the_first(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("distlion_lab.training.network.entry_points", lambda group: [])
    options = ("--workers", "2", "--beside", "global-adamw", "--beside-lr", "0.002")
    options += ("--race", "100mbit,1gbit")
    result = CliRunner().invoke(app, [*SHORT, *options, "--run-dir", str(folder)])
    assert result.exit_code == 0, result.stderr
    record = json.loads((folder / "beside" / "record.json").read_text())
    assert (record["settings"]["rule"], record["settings"]["lr"]) == ("global-adamw", 0.002)
    assert "in validation loss" in result.stdout
    assert "computed" in result.stdout and "At 100mbit" in result.stdout
    assert (folder / "beside.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--beside-lr", "0.1"), "without --beside"),
        (("--beside", "global-adamw", "--crew"), "is given with --crew"),
        (("--beside", "global-adamw", "--json"), "is given with --json"),
        (("--beside", "global-adamw", "--resume", "--run-dir", "x"), "with --resume"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_is_trained(options, words):
    result = CliRunner().invoke(app, [*SHORT, *options])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("name", ["beside", "race"])
def test_folders_of_an_earlier_run_are_refused_before_anything_is_trained(tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    options = ("--beside", "global-adamw", "--race", "1gbit", "--run-dir", str(tmp_path / "run"))
    result = CliRunner().invoke(app, [*SHORT, *options])
    assert result.exit_code == 2
    assert f"{name} of an earlier run" in result.stderr
    assert os.listdir(tmp_path / "run") == [name]
