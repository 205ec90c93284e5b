"""``distlion train --race``: two runs race to one loss, with and without emulated links."""

import contextlib

import pytest
from rich.console import Console
from typer.testing import CliRunner

from distlion.errors import InvalidArgumentError
from distlion_lab.cli import app
from distlion_lab.cli import race as race_module
from distlion_lab.cli.race import print_race, print_samples, read_race, run_race
from distlion_lab.cli.training_run import Runs
from distlion_lab.errors import NetlabError
from distlion_lab.report.race import Lap
from distlion_lab.training.network import open_network
from distlion_lab.training.train_settings import TrainSettings
from run_records import make_record

SHORT = ("train", "--task", "images", "--steps", "2", "--batch-size", "4", "--eval-every", "1")
SETTINGS = [TrainSettings.with_defaults(rule=rule) for rule in ("majority", "global-adamw")]


def make_run(rule, losses, **changes):
    steps = list(range(0, 10 * len(losses), 10))
    return make_record(
        settings={"rule": rule, "steps": steps[-1]},
        sent_bytes_per_worker=1_000_000,
        losses={"seconds": [float(step) for step in range(steps[-1])]},
        evaluations={"step": steps, "seconds": [float(step) for step in steps], "loss": losses},
        **changes,
    )


VOTES, BASELINE = make_run("majority", [5.0, 3.0]), make_run("global-adamw", [5.0, 4.0, 3.0])


def show(function, *arguments):
    console = Console(width=200)
    with console.capture() as shown:
        function(console, *arguments)
    return shown.get()


class FakeNetwork:
    def __init__(self, rates):
        self._rates = rates
        self.enter = "enter"

    def set_rates(self, rates):
        self._rates.append(rates)


class FakeRuns(Runs):
    """Runs whose steps take as long as the link that they find."""

    def train(self, settings, run_dir, checkpoints):
        assert self.enter == "enter"
        run_dir.mkdir(parents=True)  # each run has a folder of its own
        step_s = {"100mbit": 2.0, "1gbit": 1.0}[run_dir.parent.name]
        return make_record(losses={"seconds": [step_s * step for step in range(settings.steps)]})


def test_steps_are_timed_over_each_link(monkeypatch, tmp_path):
    rates = []
    network = contextlib.nullcontext(FakeNetwork(rates))
    monkeypatch.setattr(race_module, "open_network", lambda n_hosts, rate: network)
    records = [VOTES.to_json(), BASELINE.to_json()]
    runs = FakeRuns(Console(quiet=True))
    laps = run_race(["100mbit", "1gbit"], runs, SETTINGS, records, tmp_path)
    assert rates == ["100mbit", "1gbit"]
    assert laps == [
        Lap("100mbit", "25 steps measured", ([0.0, 20.0], [0.0, 20.0, 40.0])),
        Lap("1gbit", "25 steps measured", ([0.0, 10.0], [0.0, 10.0, 20.0])),
    ]


@pytest.mark.parametrize("error", [NetlabError, InvalidArgumentError])
def test_without_emulated_links_seconds_are_computed_and_the_reason_is_said(
    monkeypatch, tmp_path, error
):
    def refuse(n_hosts, rate):
        raise error("it needs root rights")

    monkeypatch.setattr(race_module, "open_network", refuse)
    messages = Console(record=True, quiet=False, width=200)
    records = [VOTES.to_json(), BASELINE.to_json()]
    with messages.capture() as shown:
        laps = run_race(["1mbit"], Runs(messages), SETTINGS, records, tmp_path)
    assert "it needs root rights. Seconds of the race are computed" in shown.get()
    assert laps[0].how.startswith("computed")
    # 0.1 MB a step are 0.8 s at 1 Mbit/s.
    assert laps[0].seconds[0] == pytest.approx([0.0, 9.0 + 8.0])


@pytest.mark.parametrize(
    ("changes", "n_steps"), [({"every": 8}, 32), ({"momentum_sync_every": 20}, 40), ({}, 25)]
)
def test_whole_periods_are_timed_where_steps_send_unlike(monkeypatch, tmp_path, changes, n_steps):
    network = contextlib.nullcontext(FakeNetwork([]))
    monkeypatch.setattr(race_module, "open_network", lambda n_hosts, rate: network)
    rule = "scaled" if "every" in changes else "majority"
    settings = [TrainSettings.with_defaults(rule=rule, **changes), SETTINGS[1]]
    records = [VOTES.to_json(), BASELINE.to_json()]
    (lap,) = run_race(["1gbit"], FakeRuns(Console(quiet=True)), settings, records, tmp_path)
    assert lap.how == f"{n_steps} steps measured"


def test_one_rule_races_with_itself(monkeypatch, tmp_path):
    network = contextlib.nullcontext(FakeNetwork([]))
    monkeypatch.setattr(race_module, "open_network", lambda n_hosts, rate: network)
    records = [VOTES.to_json(), BASELINE.to_json()]
    runs = FakeRuns(Console(quiet=True))
    assert len(run_race(["1gbit"], runs, SETTINGS[:1] * 2, records, tmp_path)) == 1


def test_a_rate_given_twice_is_one_link():
    assert read_race({"race": "1gbit, 1000mbit,5mbit", "beside": "lion"}) == ["1gbit", "5mbit"]


def test_no_race_needs_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(race_module, "open_network", None)
    assert run_race([], Runs(Console(quiet=True)), SETTINGS, [], tmp_path) == []


def test_nothing_emulates_where_no_package_is_installed_for_it(monkeypatch):
    monkeypatch.setattr("distlion_lab.training.network.entry_points", lambda group: [])
    with pytest.raises(NetlabError, match="distlion-netlab is not installed"):
        open_network(2, "100mbit")


def test_who_arrives_first_is_said_for_each_link():
    laps = [
        Lap("100mbit", "25 steps measured", ([0.0, 20.0], [0.0, 30.0, 60.0])),
        Lap("1gbit", "25 steps measured", ([0.0, 20.0], [0.0, 5.0, 10.0])),
    ]
    shown = show(print_race, [VOTES, BASELINE], laps)
    assert "time to a validation loss of 3.000, which both reach" in shown
    assert "At 100mbit majority is 3.0x as fast as global-adamw." in shown
    assert "At 1gbit global-adamw is 2.0x as fast as majority." in shown
    assert shown.count("25 steps measured") == 2


def test_each_model_continues_one_line():
    sample = {"prompt": "def run(", "data": "self):"}
    runs = [
        make_run(rule, [5.0, 3.0], sample=sample | {"model": text})
        for rule, text in (("majority", "x)"), ("global-adamw", "[red]y"))
    ]
    lines = [line.strip() for line in show(print_samples, runs).splitlines()]
    assert lines[lines.index("majority continues:") + 1] == "x)"
    assert lines[lines.index("global-adamw continues:") + 1] == "[red]y"
    assert lines[lines.index("the text continues:") + 1] == "self):"


def test_images_have_no_sample():
    assert show(print_samples, [VOTES, BASELINE]) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--race", "1gbit"), "--race is given without --beside"),
        (("--race", "fast", "--beside", "global-adamw"), "--race: rate 'fast'"),
    ],
)
def test_a_race_that_cannot_be_is_refused_before_anything_is_trained(options, words):
    result = CliRunner().invoke(app, [*SHORT, *options])
    assert result.exit_code == 2
    assert words in result.stderr
