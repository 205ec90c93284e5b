"""Votes weighed by agreement against a majority: the plan, a short run, and what is decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from programs import BENCHMARKS, imported_by_name

MODULES = (
    "study_path",
    *("schedule", "variants", "feedback", "masked", "scoring", "weighed_votes", "methods"),
    *("runs", "archive", "work", "cells", "plan", "images", "text", "sources"),
    *("protocol", "watched", "unequal", "gap", "option"),
)


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The modules of the program."""
    with imported_by_name("reliability", *MODULES) as found:
        yield found


class Made:
    """Records as they would come, of accuracies by method and condition.

    Args:
        study: The modules.
        accuracies: Beside the 50 % of all others, in percent, by method, alpha and flippers.
    """

    def __init__(self, study: Any, accuracies: dict[tuple[str, float | None, int], float]) -> None:
        self._study, self._accuracies = study, accuracies
        self.found: dict[str, dict[str, Any]] = {}

    def find(self, name: str) -> dict[str, Any] | None:
        return self.found.get(name)

    def make_all(self) -> None:
        for run in self._study.protocol.list_open(self.find):
            percent = self._accuracies.get((run.method, run.alpha, run.attackers), 50.0)
            n = run.attackers
            self.found[run.name] = {
                "config": {"attackers": n},
                "test": {"accuracy": percent / 100 + run.seed / 1000},
                "agreement": [0.31 + run.seed / 100] * n + [0.52] * (8 - n),
                "named": [0, 7] if n else [],
            }


@pytest.mark.smoke
def test_each_condition_has_three_seeds_of_each_method_at_one_rate(study: Any) -> None:
    runs = study.protocol.list_open(lambda name: None)

    assert len({run.name for run in runs}) == len(runs) == 3 * 2 * 3 * 3
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert {(run.alpha, run.lr) for run in runs} == {(None, 0.0016), (0.1, 0.0002)}
    assert {(run.attackers, run.factor) for run in runs} == {(0, 1.0), (2, -1.0), (3, -1.0)}
    assert {(run.workers, run.steps, run.batch) for run in runs} == {(8, 1055, 128)}


def test_rates_are_those_that_the_study_chose_for_a_majority(study: Any) -> None:
    records = study.archive.Records(BENCHMARKS / "results" / "runs")
    parts = {part.name: part.cells for part in study.plan.PARTS}
    (even,) = (cell for cell in parts["images-8"] if cell.method == "majority")
    (skewed,) = (cell for cell in parts["skew-tuned"] if cell.method == "majority")

    for cell in (even, skewed):
        choice = study.cells.choose_rate(cell, records.read)
        assert choice.rate == study.protocol.RATES[cell.alpha]


BETTER = {("gated", None, 2): 51.0, ("gated", None, 3): 53.0}


@pytest.mark.parametrize(
    ("changes", "decided"),
    [
        (BETTER, "build"),
        (BETTER | {("gated", None, 2): 50.9}, "reject"),
        (BETTER | {("gated", 0.1, 0): 49.1}, "build"),
        (BETTER | {("gated", 0.1, 0): 49.0}, "reject"),
        ({}, "reject"),
    ],
)
def test_what_is_decided_follows_the_protocol(
    study: Any, changes: dict[tuple[str, float | None, int], float], decided: str
) -> None:
    made = Made(study, changes)
    assert study.protocol.decide(made.find, "gated") == "open"
    made.make_all()

    assert study.protocol.decide(made.find, "gated") == decided
    assert study.protocol.decide(made.find, "weighted") == "reject"


def test_a_lead_that_not_all_seeds_have_is_inconclusive(study: Any) -> None:
    made = Made(study, BETTER)
    made.make_all()
    (first, *_) = study.protocol.list_runs("gated", (None, 3))
    made.found[first.name]["test"]["accuracy"] = 0.5009

    assert study.protocol.judge(made.find, "gated", (None, 3)) == "inconclusive"


def test_a_run_that_diverged_counts_as_chance(study: Any) -> None:
    made = Made(study, {})
    made.make_all()
    for run in study.protocol.list_runs("weighted", (0.1, 0)):
        made.found[run.name]["test"] = None

    assert study.protocol.judge(made.find, "weighted", (0.1, 0)) == "worse"
    assert "10.0 ± 0.0, worse" in study.protocol.describe(made.find)


def test_the_page_shows_accuracies_agreement_and_who_was_named(study: Any) -> None:
    made = Made(study, BETTER)
    empty = study.protocol.describe(made.find)
    made.make_all()
    page = study.protocol.describe(made.find)

    assert "| even, 3 flip | open | open | open |  |  | 0 of 0 | 0 |" in empty
    assert "Decided: weighted: open, gated: open." in empty
    row = "| even, 3 flip | 50.2 ± 0.1 | 50.2 ± 0.1, inconclusive | 53.2 ± 0.1, better | "
    assert row + "0.32 to 0.34 | 0.52 to 0.52 | 3 of 9 | 3 |" in page
    assert "| alpha 0.1 | 50.2 ± 0.1 |" in page
    assert "Decided: weighted: reject, gated: build." in page


@pytest.fixture
def task(study: Any) -> Any:
    """A small task of noise whose classes can be told apart."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(n) % 10
        pixels = torch.randn(n, 3, size, size, generator=generator)
        return (pixels + labels.view(-1, 1, 1, 1) / 3).half(), labels

    images = study.images.Images(draw(64, 40), draw(20, 32), draw(30, 32), "noise")
    return study.images.ImageTask(
        images, batch=16, workers=8, seed=1, width=4, groups=2, alpha=None
    )


def configure(study: Any, method: str) -> Any:
    """Return a short run with two flippers."""
    (run, *_) = study.protocol.list_runs(method, (None, 2))
    return replace(run, steps=12, batch=16, evaluations=1)


@pytest.mark.parametrize("method", ["weighted", "gated"])
def test_a_run_of_a_method_that_weighs_records_its_weights(
    study: Any, task: Any, method: str
) -> None:
    record = study.watched.WatchedTrainer(configure(study, method), task, lambda _: None).run()

    assert record["diverged"] is None
    assert (len(record["agreement"]), len(record["weights"])) == (8, 8)
    assert record["bits_up"] == 1


def test_a_majority_that_is_watched_is_the_study_s_majority_bitwise(study: Any, task: Any) -> None:
    config = configure(study, "majority")
    watched = study.watched.WatchedTrainer(config, task, lambda _: None).run()
    plain = study.runs.Trainer(config, task, lambda _: None).run()

    assert watched["parameters_sha256"] == plain["parameters_sha256"]
    assert watched["named"] == []
    assert len(watched["agreement"]) == 8
    assert 0 < min(watched["agreement"]) < 0.5 < max(watched["agreement"]) < 1


def test_the_program_lists_what_is_open_and_writes_the_page(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study.program.main(["open", "--results", str(tmp_path)])
    assert len(capsys.readouterr().out.split()) == 54 + 6 + 18 + 18

    study.program.main(["report", "--results", str(tmp_path)])
    assert "Decided: weighted: open" in (tmp_path / "reliability.md").read_text()


def make_named(study: Any, named: dict[tuple[float | None, int], list[int]]) -> dict[str, Any]:
    """Return records of the warning's second form; by default flippers are named."""
    return {
        run.name: {
            "agreement": [0.4] * run.attackers + [0.5] * (8 - run.attackers),
            "named": named.get((run.alpha, run.attackers), list(range(run.attackers))[::-1]),
        }
        for run in study.gap.list_gap()
    }


@pytest.mark.parametrize(
    ("named", "decided"),
    [
        ({}, "holds"),
        ({(0.1, 0): [5], (0.1, 2): [], (0.1, 3): [7]}, "holds"),
        ({(None, 0): [5]}, "fails"),
        ({(None, 2): [0]}, "fails"),
        ({(None, 3): [0, 1, 2, 7]}, "fails"),
    ],
)
def test_the_warning_holds_if_it_names_flippers_and_nobody_else_on_even_data(
    study: Any, named: dict[tuple[float | None, int], list[int]], decided: str
) -> None:
    found = make_named(study, named)
    assert study.gap.decide_warning(found.get) == decided

    for condition in ((None, 0), (None, 3)):
        del found[study.gap.list_condition(condition)[1].name]
    # What is there may show a failure, whatever is open.
    assert study.gap.decide_warning(found.get) == ("fails" if decided == "fails" else "open")


def test_new_seeds_judge_the_warning_at_the_old_conditions(study: Any) -> None:
    old = [run for run in study.protocol.list_open(lambda name: None) if run.method == "majority"]
    new = study.gap.list_gap()

    assert {run.seed for run in old} == {1, 2, 3}
    assert [run.seed for run in new] == [4] * 6 + [5] * 6 + [6] * 6
    assert new == [replace(run, seed=run.seed + 3) for run in old]


def test_the_page_shows_gaps_and_names(study: Any) -> None:
    page = study.gap.describe_gap(make_named(study, {(0.1, 3): [0, 7]}).get)

    assert "| even |  | +0.0 to +0.0 | 0 of 0 | 0 |" in page
    assert "| even, 2 flip | -10.0 to -10.0 | +0.0 to +0.0 | 6 of 6 | 0 |" in page
    assert "| alpha 0.1, 3 flip | -10.0 to -10.0 | +0.0 to +0.0 | 3 of 9 | 3 |" in page
    assert page.endswith("On even data: holds.\n")
    assert "| even | open | open | open | open |" in study.gap.describe_gap({}.get)


class _Images:
    """A task of which only batches are asked for."""

    validate = test = None

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.full((32, 2), float(worker)), torch.arange(32)) for worker in range(8)]


def test_unequal_workers_use_the_first_images_of_equal_batches(study: Any) -> None:
    runs = study.unequal.list_unequal()
    assert len({run.name for run in runs}) == 6
    assert all(study.unequal.is_unequal(run) for run in runs)
    assert not any(map(study.unequal.is_unequal, study.protocol.list_open(lambda name: None)))

    batches = study.unequal.UnequalTask(_Images()).batches(0)

    assert [len(targets) for _, targets in batches] == [32] * 5 + [1] * 3
    assert [float(inputs[0, 0]) for inputs, _ in batches] == list(range(8))


def test_only_proportional_votes_have_weights(study: Any) -> None:
    majority, proportional = study.unequal.list_unequal()[:2]
    trainers = [
        study.unequal.UnequalTrainer(run, _Images(), lambda step: None)
        for run in (majority, proportional)
    ]
    clusters = [trainer._method.optimizer for trainer in trainers]
    assert [cluster.weights for cluster in clusters] == [(1,) * 8, study.unequal.SIZES]
    assert [group["lr"] for group in clusters[1].param_groups] == [0.0016]
    own, other = ({**cluster.param_groups[0], "params": []} for cluster in clusters)
    assert own == other


@pytest.mark.parametrize(
    ("weighted", "verdict"), [(52.0, "better"), (50.5, "inconclusive"), (48.0, "worse")]
)
def test_the_table_of_unequal_batches_judges_all_seeds(
    study: Any, weighted: float, verdict: str
) -> None:
    percent = {"majority": 50.0, "proportional": weighted}
    found = {
        run.name: {"test": {"accuracy": percent[run.method] / 100 + run.seed / 1000}}
        for run in study.unequal.list_unequal()
    }
    assert study.unequal.describe_unequal(found.get).splitlines()[-1].endswith(f"| {verdict} |")
    del found[next(iter(found))]
    assert study.unequal.describe_unequal(found.get).splitlines()[-1].endswith("| open |")


@pytest.mark.parametrize(
    ("changes", "decided"),
    [
        ({(None, 2): 51.0, (None, 3): 53.0}, "ship"),
        ({(None, 2): 51.0, (None, 3): 50.9}, "reject"),
        ({(None, 2): 51.0, (None, 3): 53.0, (None, 0): 49.0}, "reject"),
        ({(None, 2): 51.0, (None, 3): 53.0, (0.1, 3): 48.0}, "reject"),
    ],
)
def test_the_option_ships_by_the_protocol(
    study: Any, changes: dict[tuple[float | None, int], float], decided: str
) -> None:
    made = Made(study, {})
    made.make_all()
    assert study.option.decide_option(made.find) == "open"
    for run in study.option.list_option():
        percent = changes.get((run.alpha, run.attackers), 50.0)
        made.found[run.name] = {
            "test": {"accuracy": percent / 100 + run.seed / 1000},
            "excluded": [0.5] * run.attackers + [0.02] + [0.0] * (7 - run.attackers),
        }

    assert study.option.decide_option(made.find) == decided
    page = study.option.describe_option(made.find)
    assert "| even, 2 flip | 50.2 ± 0.1 | 51.2 ± 0.1, better | 50 % | 2 % |" in page
    assert page.endswith(f"Decided: {decided}.\n")
    assert "| even | open | open | open | open |" in study.option.describe_option({}.get)


def test_a_run_of_the_option_records_who_was_left_out(study: Any, task: Any) -> None:
    (run, *_) = study.protocol.list_runs("excluding", (None, 2))
    config = replace(run, steps=12, batch=16, evaluations=1)
    record = study.option.ExcludingTrainer(config, task, lambda _: None).run()

    assert record["diverged"] is None
    assert len(record["excluded"]) == 8
    assert record["excluded"] == [0.0] * 8  # two looks are not enough
