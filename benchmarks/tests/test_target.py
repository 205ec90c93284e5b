"""Time to a target: crossings, targets, rates, clocks and what is trained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from programs import imported_by_name

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

MODULES = (
    "study_path",
    "schedule",
    "variants",
    "feedback",
    "scoring",
    "methods",
    "runs",
    "archive",
    "work",
    "cells",
    "plan",
    "images",
    "text",
    "settings",
    "curves",
    "host",
    "laboratory",
    "drawing",
    "outcome",
)
# Halves have 11 bits; AdamW's first steps are of size lr, whatever the gradient's.
HALF_ROUNDING = 2.0**-11


@pytest.fixture(scope="module")
def target() -> Iterator[Any]:
    """The modules of the program and of the study, and the program itself as ``program``."""
    with imported_by_name("target", *MODULES) as found:
        yield found


def make_curve(*outcomes: float, column: int) -> list[list[float]]:
    """Return a curve that is scored every 10 steps; the other column is -1."""
    rows = [[10 * (place + 1), -1.0, -1.0] for place in range(len(outcomes))]
    for row, outcome in zip(rows, outcomes, strict=True):
        row[column] = outcome
    return rows


# Crossings


def test_an_accuracy_is_reached_on_the_line_between_two_scores(target: Any) -> None:
    curve = make_curve(0.2, 0.4, 0.6, column=2)
    assert target.outcome.cross(curve, "images", 0.45) == pytest.approx(22.5)


def test_a_loss_is_reached_from_above(target: Any) -> None:
    curve = make_curve(3.0, 2.5, 2.0, column=1)
    assert target.outcome.cross(curve, "text", 2.4) == pytest.approx(22.0)


def test_a_curve_that_is_there_at_its_first_score_counts_from_that_step(target: Any) -> None:
    assert target.outcome.cross(make_curve(0.5, 0.6, column=2), "images", 0.4) == 10


def test_only_the_first_crossing_counts(target: Any) -> None:
    curve = make_curve(0.2, 0.6, 0.2, 0.6, column=2)
    assert target.outcome.cross(curve, "images", 0.4) == pytest.approx(15)


def test_a_target_out_of_reach_is_not_reached(target: Any) -> None:
    assert target.outcome.cross(make_curve(0.2, 0.4, column=2), "images", 0.41) is None


def make_row(target: Any, *ends: float) -> Any:
    cell = target.settings.make_cell("images", "majority")
    choice = target.cells.Choice({}, (), 1e-3, False)
    curves = {seed + 1: make_curve(0.1, end, column=2) for seed, end in enumerate(ends)}
    return target.outcome.Row(cell, "majority", choice, curves, frozenset())


def test_a_method_has_reached_a_target_only_if_all_seeds_have(target: Any) -> None:
    asked = target.settings.Target("close", 0.5)
    assert len(make_row(target, 0.5, 0.6, 0.7).crossings(asked)) == 3
    assert make_row(target, 0.5, 0.6, 0.49).crossings(asked) is None
    assert make_row(target, 0.5, 0.6).crossings(asked) is None


# Rates and targets


def tuned(target: Any, task: str, method: str, losses: dict[float, float]) -> dict[str, Any]:
    """Return records of tuning runs, all of them with an accuracy of 0.567."""
    cell = target.settings.make_cell(task, method)
    return {
        cell.tuning(rate).name: {"diverged": None, "validation": [[1, loss, 0.567]]}
        for rate, loss in losses.items()
    }


def test_a_seed_that_diverges_reaches_nothing(target: Any) -> None:
    row = make_row(target, 0.5, 0.6, 0.7)
    wanted = target.settings.Target("close", 0.5)
    assert len(row.list_crossings(wanted)) == 3
    lost = dataclasses.replace(row, diverged=frozenset({2}))
    assert lost.has_diverged
    assert len(lost.list_crossings(wanted)) == 2
    assert lost.crossings(wanted) is None
    # One that diverged before its first score has none at all.
    bare = dataclasses.replace(lost, curves={**row.curves, 2: []})
    assert len(bare.list_crossings(wanted)) == 2


def test_targets_come_from_the_best_tuning_run_of_adamw(target: Any) -> None:
    images = tuned(target, "images", "global-adamw", {8e-3: 1.5, 16e-3: 1.2, 32e-3: 1.4})
    text = tuned(target, "text", "global-adamw", {2e-3: 2.5, 4e-3: 2.32, 8e-3: 2.4})
    found = target.settings.set_targets("images", images.get)
    assert [(each.name, each.value) for each in found] == [("close", 0.54), ("rough", 0.50)]
    found = target.settings.set_targets("text", text.get)
    assert [each.value for each in found] == pytest.approx([2.45, 2.55])


@pytest.mark.parametrize("accuracy", [0.57, 0.58, 0.29])
def test_whole_points_stay_whole(target: Any, accuracy: float) -> None:
    images = tuned(target, "images", "global-adamw", {8e-3: 1.5, 16e-3: 1.2, 32e-3: 1.4})
    for record in images.values():
        record["validation"] = [[1, record["validation"][0][1], accuracy]]
    # 100 * 0.57 is a little less than 57.
    values = [each.value for each in target.settings.set_targets("images", images.get)]
    assert values == pytest.approx([accuracy - 0.02, accuracy - 0.06])


def test_there_are_no_targets_before_adamw_is_tuned(target: Any) -> None:
    assert target.settings.set_targets("text", {}.get) == []


def test_half_precision_takes_the_rate_of_adamw(target: Any) -> None:
    records = tuned(target, "text", "global-adamw", {2e-3: 2.5, 4e-3: 2.3, 8e-3: 2.4})
    cell = target.settings.make_cell("text", "fp16-adamw")
    assert target.cells.choose_rate(cell, records.get).rate == 4e-3


def test_the_longer_run_takes_the_rate_of_the_shorter_one(target: Any) -> None:
    records = tuned(target, "text", "majority", {4e-4: 2.5, 8e-4: 2.3, 1.6e-3: 2.4})
    cell = target.settings.make_longer("text")
    runs = target.settings.list_open_runs([cell], records.get)
    assert [(run.lr, run.steps, run.evaluations) for run in runs] == [(8e-4, 800, 20)] * 3


def test_rates_are_tried_before_anything_is_reported(target: Any) -> None:
    cells = target.settings.list_cells("images")
    runs = target.settings.list_open_runs(cells, {}.get)
    assert all(run.is_tuning and run.seed == 0 for run in runs)
    # Five methods have rates of their own, three each; none is listed twice.
    assert len({run.name for run in runs}) == len(runs) == 15


# What is trained


def test_the_networks_have_about_a_million_parameters(target: Any) -> None:
    sizes = []
    for setting, module in ((target.settings.IMAGES, "images"), (target.settings.TEXT, "text")):
        network = dict(setting.network)
        model = (
            target.images.build_network(**network, seed=0)
            if module == "images"
            else target.text.SmallGPT(**network)
        )
        sizes.append(sum(param.numel() for param in model.parameters()))
    assert sizes == [962_602, 977_440]


def test_the_study_network_is_unchanged_without_shrinking(target: Any) -> None:
    model = target.images.build_network(16, groups=2, seed=0)
    assert sum(param.numel() for param in model.parameters()) == 107_610


def make_images(target: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(count, 3, size, size, generator=generator).half()
        return images, torch.arange(count) % 10

    return target.images.Images(draw(64, 40), draw(20, 32), draw(30, 32), "noise")


class NoiseData:
    """Stands in for the data of the program."""

    def __init__(self, target: Any) -> None:
        self._target, self._images = target, make_images(target)

    def build(self, config: Any) -> tuple[Any, str]:
        workers = max(1, config.workers)
        task = self._target.images.ImageTask(
            self._images, batch=8, workers=workers, seed=config.seed, alpha=None, **config.network
        )
        return task if config.is_tuning else self._target.curves.OnTest(task), "noise"


def make_config(target: Any, method: str, *, is_tuning: bool) -> Any:
    config = target.settings.make_cell("images", method).config(1e-3, 1, is_tuning=is_tuning)
    network = {"width": 4, "groups": 2, "shrink": 2}
    return replace(config, steps=4, batch=8, network=network)


def run_noise(target: Any, tmp_path: Path, method: str, *, is_tuning: bool) -> dict[str, Any]:
    records = target.archive.Records(tmp_path)
    config = make_config(target, method, is_tuning=is_tuning)
    assert target.work.perform(records, config, partial(target.curves.make, NoiseData(target)))
    record: dict[str, Any] = records.read(config.name)
    return record


def test_a_reported_run_has_a_curve_of_test_data(target: Any, tmp_path: Path) -> None:
    record = run_noise(target, tmp_path, "majority", is_tuning=False)
    assert "validation" not in record
    # 30 images are for test, 20 for validation: only their number tells them apart here.
    assert record["test"]["units"]["count"] == 30
    assert record["test_curve"][-1] == [4, record["test"]["loss"], record["test"]["accuracy"]]


def test_a_tuning_run_leaves_test_data_alone(target: Any, tmp_path: Path) -> None:
    record = run_noise(target, tmp_path, "majority", is_tuning=True)
    assert record["test"] is None and "test_curve" not in record
    assert len(record["validation"]) == 1


def train_noise(target: Any, method: str, lr: float = 1e-3) -> tuple[Any, list[torch.Tensor]]:
    config = replace(make_config(target, method, is_tuning=True), lr=lr, workers=4)
    task, _ = NoiseData(target).build(config)
    trainer = target.runs.Trainer(config, task, lambda done: None)
    trainer.run()
    return trainer, [param.detach().clone() for param in trainer._model.parameters()]


def test_half_precision_is_adamw_but_for_rounding(target: Any) -> None:
    _, whole = train_noise(target, "global-adamw")
    trainer, halved = train_noise(target, "fp16-adamw")
    assert trainer._method.up_bits_per_parameter == 16
    largest = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(whole, halved, strict=True)
    )
    assert 0 < largest < 64 * HALF_ROUNDING


def test_power_sgd_sends_less_and_steps_by_adamw(target: Any) -> None:
    trainer, _ = train_noise(target, "powersgd-adamw")
    assert isinstance(trainer._method.optimizer, torch.optim.AdamW)
    assert trainer._method.up_bits_per_parameter < 32


# In the lab


def test_the_clock_stands_still_while_test_data_is_scored(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    host = target.host
    monkeypatch.setattr(host.time, "perf_counter", lambda: now)
    monkeypatch.setattr(host.dist, "barrier", lambda: wait(1000))
    monkeypatch.setattr(host.dist, "get_rank", lambda: 0)
    worker = SimpleNamespace(step=lambda: wait(1))

    def score() -> list[float]:
        wait(100)
        return [2.0, 0.5]

    curve = host._follow(worker, [2, 4], score)
    assert curve == [[2, 2.0, 2.0, 0.5], [4, 4.0, 2.0, 0.5]]


def test_a_job_trains_what_the_virtual_workers_train(target: Any) -> None:
    job = target.host.Job(task="text", folder="", out="", method="majority", lr=8e-4, seed=2)
    cell = target.settings.make_cell("text", "majority")
    assert job.config("majority") == cell.config(8e-4, 2, is_tuning=False)


# Reports


def test_a_report_without_records_names_what_is_missing(target: Any, tmp_path: Path) -> None:
    records = target.archive.Records(tmp_path / "target")
    text = target.outcome.write_report(records, tmp_path)
    assert "two-bit votes: 0 of 3 seeds" in text
    assert "TCP congestion control of the hosts: none was measured." in text
    assert (tmp_path / "time_to_target.png").exists()


def test_a_report_names_the_congestion_controls_of_its_records(target: Any, tmp_path: Path) -> None:
    for link, control in (("1gbit", "bbr"), ("100mbit", "cubic")):
        found = {"conditions": {"tcp_congestion_control": control}}
        target.laboratory.save(tmp_path / f"steps_text_{link}.json", found)
    assert target.outcome.name_congestion_controls(tmp_path) == "bbr, cubic"


def test_seconds_are_steps_times_the_median_and_ratios_are_to_ddp(
    target: Any, tmp_path: Path
) -> None:
    target.laboratory.save(
        tmp_path / "steps_images_100mbit.json",
        {"seconds": {"majority": [0.1, 0.2, 9.0], "global-adamw": [0.8, 0.8, 0.8]}},
    )
    adamw = target.settings.make_cell("images", "global-adamw")
    row = make_row(target, 0.6, 0.6, 0.6)
    rows = [row, replace(row, cell=adamw, title="DDP")]
    asked = [target.settings.Target("close", 0.6)]
    _, head, lines = target.outcome.tabulate_targets("images", tmp_path, rows, asked)
    assert head[3] == "close: 60%, 100 Mbit/s"
    assert lines[0][3] == "4.0 (4.0 - 4.0), 4.00x"
    assert lines[1][3] == "16.0 (16.0 - 16.0), 1.00x"
    # Nothing was measured there.
    assert lines[0][4] == "missing"


def test_a_target_that_not_all_seeds_reach_says_how_many_do(target: Any, tmp_path: Path) -> None:
    asked = [target.settings.Target("close", 0.6)]
    rows = [make_row(target, 0.6, 0.5, 0.6)]
    _, _, lines = target.outcome.tabulate_targets("images", tmp_path, rows, asked)
    assert lines[0][3] == "not reached (2 of 3 seeds)"


def test_other_betas_take_the_steps_of_the_majority_vote(target: Any, tmp_path: Path) -> None:
    short = "majority-betas-90-95"
    assert short not in target.settings.TIMED
    (tmp_path / "steps_text_1gbit.json").write_text(json.dumps({"seconds": {"majority": [1.0]}}))
    found = target.outcome.read_step_seconds(tmp_path, "text", "1gbit")
    assert found == {"majority": [1.0], short: [1.0]}
    betas = [
        target.host.build_optimizer(make_config(target, method, is_tuning=True), model, method)[1]
        for method in ("majority", short)
        for model in (torch.nn.Linear(2, 2),)
    ]
    assert [each.param_groups[0]["betas"] for each in betas] == [(0.9, 0.99), (0.9, 0.95)]
