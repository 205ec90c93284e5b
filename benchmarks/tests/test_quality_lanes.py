"""The comparison with AdamW on a device: the same bits as run by run, and many lanes at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion.kernels.words import tree_mean
from programs import imported_by_name

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

MODULES = (
    "study_path",
    *("schedule", "variants", "feedback", "masked", "scoring", "methods"),
    *("runs", "archive", "work", "cells", "plan", "evidence", "images", "text", "sources"),
    *("settings", "design", "differences", "answers", "flat_layout", "flat_methods", "lanes"),
    *("controls", "pictures", "pages"),
)
CPU = torch.device("cpu")
METHODS = (
    "majority-orthogonal",
    "majority-orthogonal-betas-90-95-decay-4",
    "global-muon-betas-90-99",
    "majority",
    "majority-cautious-betas-90-95-decay-4",
    "library-feedback-2-betas-90-95-decay-025",
    "library-feedback-2-cautious",
    "global-lion-betas-90-95",
    "global-adamw-betas-90-99-decay-4",
)


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    """The modules of the program."""
    with imported_by_name("quality", *MODULES) as found:
        yield found


class TinyData:
    """A few images and a short text, all noise; networks keep their axes in the usual order."""

    def __init__(self, quality: Any) -> None:
        self._quality = quality
        draw = torch.Generator().manual_seed(1)
        images = torch.randn(64, 3, 40, 40, generator=draw).half()
        labels = torch.randint(0, 10, (64,), generator=draw)
        scored = (images[:8, :, 4:36, 4:36], labels[:8])
        self._images = quality.images.Images((images, labels), scored, scored, "noise")
        text = torch.randint(0, 256, (4000,), generator=draw).to(torch.uint8)
        windows = text[: 32 * 9].view(32, 9)
        self._novels = quality.text.Novels(text, windows, windows, "noise")

    def build(self, config: Any) -> tuple[Any, str]:
        shared = {"batch": config.batch, "workers": config.workers, "seed": config.seed}
        if config.task == "text":
            return self._quality.text.TextTask(self._novels, **shared, **config.network), "noise"
        task = self._quality.images.ImageTask(
            self._images, **shared, **config.network, alpha=config.alpha
        )
        build = task.build_model
        task.build_model = lambda: build().to(memory_format=torch.contiguous_format)
        return task, "noise"


@pytest.fixture
def data(quality: Any) -> TinyData:
    quality.lanes._TABLES.clear()
    return TinyData(quality)


def make_config(quality: Any, task: str, **changes: Any) -> Any:
    network = {"width": 24, "layers": 1, "heads": 2, "context": 8}
    config = quality.runs.RunConfig(
        task=task,
        method="majority",
        workers=4,
        lr=1e-3,
        seed=3,
        steps=6,
        batch=8,
        evaluations=2,
        alpha=None,
        attackers=0,
        factor=1.0,
        network=network if task == "text" else {"width": 8, "groups": 2},
        is_tuning=False,
    )
    return replace(config, **changes)


@pytest.mark.parametrize("task", ["text", "images"])
@pytest.mark.parametrize("method", METHODS)
def test_flat_run_has_the_bits_of_the_plain_one(
    quality: Any, data: TinyData, task: str, method: str
) -> None:
    config = make_config(quality, task, method=method)
    model, _ = data.build(config)
    plain = quality.runs.Trainer(config, model, lambda done: None).run()
    flat = quality.lanes.train(config, data, CPU)
    assert flat.pop("data") == "noise"
    assert flat == {name: plain[name] for name in flat}
    assert set(plain) - set(flat) == {"cpu_s", "wall_s"}


@pytest.mark.parametrize("task", ["text", "images"])
def test_32_workers_have_the_bits_of_the_plain_run(quality: Any, data: TinyData, task: str) -> None:
    config = make_config(quality, task, workers=32, batch=32, method="majority-cautious")
    model, _ = data.build(config)
    plain = quality.runs.Trainer(config, model, lambda done: None).run()
    flat = quality.lanes.train(config, data, CPU)
    assert flat["parameters_sha256"] == plain["parameters_sha256"]


def test_means_of_large_parameters_are_those_of_the_library(quality: Any) -> None:
    sizes = (3 * 4096 + 5, 1, 4096, 70)
    params = [torch.zeros(size) for size in sizes]
    layout = quality.flat_layout.FlatLayout.of(params)
    rows = torch.randn(2, layout.length, generator=torch.Generator().manual_seed(0)).exp()
    means = quality.flat_layout.ParameterMeans(layout, CPU)
    found = (means.add_up(rows) / means.counts).float()
    for row, mean in zip(rows, found, strict=True):
        expected = [tree_mean(each, each.numel()) for each in layout.view(row)]
        assert mean.tolist() == [float(each) for each in expected]


@pytest.mark.parametrize(
    ("method", "lr"), [("global-adamw", 1e30), ("majority", 1e38), ("global-lion", 1e20)]
)
def test_divergence_is_recorded_as_by_the_plain_program(
    quality: Any, data: TinyData, method: str, lr: float
) -> None:
    config = make_config(quality, "text", method=method, lr=lr, evaluations=6)
    model, _ = data.build(config)
    plain = quality.runs.Trainer(config, model, lambda done: None).run()
    flat = quality.lanes.train(config, data, CPU)
    assert flat["diverged"]["step"] == plain["diverged"]["step"]
    for name in ("test", "validation", "train_loss"):
        assert flat[name] == plain[name]
    json.dumps(flat, allow_nan=False)


@pytest.mark.parametrize("task", ["text", "images"])
@pytest.mark.parametrize("method", ["global-adamw", "global-lion-betas-90-95"])
def test_mean_of_two_half_batches_is_that_of_the_whole_one(
    quality: Any, data: TinyData, task: str, method: str
) -> None:
    config = make_config(quality, task, method=method, workers=0)
    whole, _ = data.build(replace(config, workers=1))
    plain = quality.runs.Trainer(config, whole, lambda done: None).run()
    halves = quality.lanes.train(config, data, CPU)
    assert halves["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-3)
    assert halves["train_loss"][:2] == pytest.approx(plain["train_loss"][:2], abs=2e-5)


@pytest.mark.parametrize("method", ["masked-betas-90-95", "one-bit-adam", "quantized-2"])
def test_a_method_without_a_flat_form_is_refused(quality: Any, data: TinyData, method: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{method}.*Run its part without --device"):
        quality.lanes.train(make_config(quality, "text", method=method), data, CPU)


@pytest.mark.parametrize("changes", [{"alpha": 0.1}, {"attackers": 1, "factor": -1.0}])
def test_uneven_data_is_refused(quality: Any, data: TinyData, changes: dict[str, Any]) -> None:
    config = make_config(quality, "images", workers=8, **changes)
    assert not quality.flat_methods.has_flat_form(config)
    with pytest.raises(InvalidArgumentError, match=f"{re.escape(config.name)}.*without --device"):
        quality.lanes.train(config, data, CPU)


# Lanes, on a device that is the CPU


class _Event:
    """An event that is over when it is asked a second time."""

    def __init__(self) -> None:
        self._asked = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1


class _Graph:
    """Repeats a step by doing it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def replay(self) -> None:
        self._run.step()


@pytest.fixture
def recorded(quality: Any, data: TinyData, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lanes that were made, each of them without CUDA."""
    names: list[str] = []

    def record(config: Any, data: TinyData, device: torch.device) -> Any:
        names.append(quality.lanes.name_lane(config))
        run = quality.lanes.FlatRun(config, data, CPU)
        return quality.lanes.Lane(run, None, _Graph(run))

    monkeypatch.setattr(quality.lanes.Lane, "record", record)
    monkeypatch.setattr(quality.lanes, "_CHUNK", 2)
    monkeypatch.setattr(quality.lanes, "_AHEAD", 2)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    return names


def test_lanes_leave_the_records_of_their_runs(
    quality: Any, data: TinyData, recorded: list[str], tmp_path: Path
) -> None:
    records = quality.archive.Records(tmp_path)
    runs = [
        make_config(quality, "text", method=method, seed=seed)
        for seed in (1, 2)
        for method in ("majority", "global-lion", "majority-cautious")
    ]
    late = make_config(quality, "text", seed=9)  # open once all others are done

    def list_open() -> list[Any]:
        opened = [run for run in runs if records.read(run.name) is None]
        return opened or [run for run in [late] if records.read(run.name) is None]

    quality.lanes.run_on_device(list_open, records, data, 600.0, most=2)
    for run in [*runs, late]:
        found = records.read(run.name)
        assert found is not None
        assert found["device"] == "pretended"
        alone = quality.lanes.train(run, data, CPU)
        assert {name: found[name] for name in alone} == alone
    assert len(recorded) == len(set(recorded)) == 3  # those of a kind share one


def test_a_run_that_another_process_is_at_or_has_done_is_left_out(
    quality: Any, data: TinyData, recorded: list[str], tmp_path: Path
) -> None:
    records = quality.archive.Records(tmp_path)
    held, done, mine = (make_config(quality, "text", seed=seed) for seed in (1, 2, 3))
    records.write(done, {"by": "another process"})
    with records.claim(held.name) as is_held:
        assert is_held
        quality.lanes.run_on_device(lambda: [held, done, mine], records, data, 600.0)
    assert records.read(held.name) is None
    assert records.read(done.name)["by"] == "another process"
    assert records.read(mine.name)["device"] == "pretended"


def test_no_run_is_begun_when_time_is_up(
    quality: Any, data: TinyData, recorded: list[str], tmp_path: Path
) -> None:
    records = quality.archive.Records(tmp_path)
    quality.lanes.run_on_device(lambda: [make_config(quality, "text")], records, data, 0.0)
    assert recorded == [] and records.read_all() == []


# Controls


def test_controls_are_runs_of_a_cpu_and_then_compared_with_them(quality: Any) -> None:
    cell = quality.design.make_cell("text-small-1k", quality.settings.SHORT)
    rates = (5e-4, 1e-3, 2e-3)
    on_cpu: dict[str, Any] = {}
    on_device: dict[str, Any] = {}

    def score(run: Any, loss: float) -> dict[str, Any]:
        units = {"count": 2, "values": [loss, loss + run.seed / 100]}
        ended = {"validation": [[run.steps, loss, 0.5]], "test": {"units": units}}
        return {"name": run.name, "diverged": None, **ended}

    def list_wanted() -> list[Any]:
        return quality.controls.list_open_controls(["text"], on_cpu.get, on_device.get)

    assert list_wanted() == []  # no rate is known
    kin = [quality.design.make_cell("text-small-1k", name) for name in ("majority", "signum")]
    for tuned in (*kin, cell):
        on_cpu |= {
            run.name: score(run, 2.0 + (rate != 1e-3))
            for rate in rates
            for run in [tuned.tuning(rate)]
        }
    runs = list_wanted()
    assert [(run.lr, run.seed, run.method) for run in runs] == [
        (1e-3, seed, cell.method) for seed in (1, 2, 3, 4, 5)
    ]
    on_cpu |= {run.name: score(run, 2.0) for run in runs}
    assert list(quality.controls.list_controls(on_cpu.get, on_device.get)) == []
    on_device |= {run.name: score(run, 2.25) for run in runs}
    assert list_wanted() == []
    (control,) = quality.controls.list_controls(on_cpu.get, on_device.get)
    assert (control.setting, control.difference.mean) == ("text-small-1k", 0.25)
    judge = quality.pages._judge_controls
    assert "1 of 6 comparisons are there" in judge([control])
    assert "below 0.0083: no run on a GPU counts" in judge([control] * 6)
    alike = replace(control, difference=replace(control.difference, p=0.01))
    assert "0.01, not below 0.0083: no difference is detected" in judge([alike] * 6)
