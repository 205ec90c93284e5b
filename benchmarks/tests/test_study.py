"""The study does what its protocol says: data, methods, runs, records and reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks/results/runs"
# Sums of 8 gradients of size 1 in another order, in float32.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def images(study: Any) -> Any:
    """A few images of noise, those of a class a little brighter."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 10
        noise = torch.randn(count, 3, size, size, generator=generator)
        return (noise + labels[:, None, None, None] / 4).half(), labels

    return study.images.Images(draw(64, 40), draw(20, 32), draw(30, 32), "noise")


@pytest.fixture(scope="module")
def novels(study: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(97, 105, shape, generator=generator, dtype=torch.uint8)

    return study.text.Novels(draw(2000), draw(32, 17), draw(64, 17), "letters")


def make_images_task(study: Any, images: Any, *, workers: int, alpha: float | None = None) -> Any:
    return study.images.ImageTask(
        images, batch=8, workers=workers, seed=1, width=4, groups=2, alpha=alpha
    )


def make_config(study: Any, **changes: Any) -> Any:
    cell = study.cells.Cell(study.plan.IMAGES, "majority", 4)
    tiny = {"steps": 3, "batch": 8, "evaluations": 2, "network": {"width": 4, "groups": 2}}
    return replace(cell.config(1e-3, 1, is_tuning=False), **tiny | changes)


def run_tiny(study: Any, images: Any, **changes: Any) -> dict[str, Any]:
    config = make_config(study, **changes)
    task = make_images_task(study, images, workers=max(1, config.workers), alpha=config.alpha)
    outcome: dict[str, Any] = study.runs.Trainer(config, task, lambda done: None).run()
    return outcome


class TinyData:
    """Stands in for the data of the program."""

    def __init__(self, study: Any, images: Any) -> None:
        self._study, self._images = study, images

    def has(self, task: str) -> bool:
        return task == "images"

    def build(self, config: Any) -> tuple[Any, str]:
        task = make_images_task(self._study, self._images, workers=max(1, config.workers))
        return task, "noise"


# Data


def test_all_numbers_of_workers_see_the_same_images(study: Any, images: Any) -> None:
    for step in (0, 7, 8):  # the end of the first epoch lies at 8
        alone = make_images_task(study, images, workers=1).batches(step)
        four = make_images_task(study, images, workers=4).batches(step)
        assert [len(labels) for _, labels in four] == [2, 2, 2, 2]
        assert torch.equal(torch.cat([inputs for inputs, _ in four]), alone[0][0])
        assert torch.equal(torch.cat([labels for _, labels in four]), alone[0][1])


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_images_keep_their_labels(study: Any, images: Any, alpha: float | None) -> None:
    labels = torch.arange(64) % 10
    pixels = labels[:, None, None, None].expand(64, 3, 40, 40).half()
    plain = replace(images, train=(pixels, labels))
    task = make_images_task(study, plain, workers=4, alpha=alpha)
    for inputs, targets in task.batches(3):
        assert torch.equal(inputs[:, 0, 0, 0].long(), targets)


def test_epoch_shows_every_image_once(study: Any, images: Any) -> None:
    task = make_images_task(study, images, workers=2)
    seen = torch.cat([task._take(0, step, 8) for step in range(8)])
    assert sorted(seen.tolist()) == list(range(64))


def test_mean_gradient_does_not_depend_on_the_number_of_workers(study: Any, images: Any) -> None:
    grads = []
    for workers in (1, 4):
        task = make_images_task(study, images, workers=workers)
        model = task.build_model()
        for inputs, labels in task.batches(0):
            (F.cross_entropy(model(inputs), labels) / workers).backward()
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    assert torch.allclose(*grads, atol=ROUNDING)


def test_crops_are_parts_of_the_image_and_half_of_them_mirrored(study: Any) -> None:
    columns = torch.arange(40.0).expand(200, 3, 40, 40)
    padded = columns + 100 * torch.arange(40.0)[:, None]
    cut = study.images.crop_and_flip(padded, torch.Generator().manual_seed(0))
    assert cut.shape == (200, 3, 32, 32)
    down, right = cut.diff(dim=2), cut.diff(dim=3)
    assert torch.equal(down, torch.full_like(down, 100))
    mirrored = right[:, 0, 0, 0] < 0
    assert torch.equal(right.abs(), torch.ones_like(right))
    assert 60 < int(mirrored.sum()) < 140
    assert len(cut[:, 0].amin((1, 2)).unique()) > 20


def test_no_book_is_both_trained_on_and_scored(study: Any, tmp_path: Path) -> None:
    kept = (*study.text.VALIDATION_BOOKS, *study.text.TEST_BOOKS)
    for number, name in enumerate((*kept, "Another")):
        (tmp_path / f"{name}.txt").write_bytes(bytes([97 + number]) * 30_000)
    books = study.text.Novels.read(tmp_path, context=8)
    values = [set(part.unique().tolist()) for part in (books.train, books.validation, books.test)]
    assert values == [{103}, {97, 98}, {99, 100, 101, 102}]
    assert (len(books.validation), len(books.test)) == (512, 4096)


def test_text_windows_are_scored_in_blocks(study: Any, novels: Any) -> None:
    size = {"width": 8, "layers": 1, "heads": 2, "context": 16}
    task = study.text.TextTask(novels, batch=4, workers=2, seed=0, **size)
    result = task.test(task.build_model())
    assert len(result.units) == 2
    assert result.units.mean() == pytest.approx(result.loss)


# Methods


def test_shared_momentum_is_that_of_the_outcomes(study: Any) -> None:
    start, lr, steps = [0.5, -0.25, 0.125], 0.01, 4
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data = torch.tensor([start])
    run = study.methods.Run(lr=lr, workers=3, steps=steps, seed=0)
    method = study.methods.build_method("shared-majority", model, run)
    votes = np.random.default_rng(0).choice([-1.0, 1.0], (steps, 3, 3))
    x, y = np.array(start), np.zeros(3)
    for step in range(steps):
        for worker in range(3):
            model.weight.grad = torch.tensor(votes[step, worker][None]).float() * (worker + 1)
            method.collect(worker)
        method.step()
        y = 0.9 * y + 0.1 * np.sign(votes[step].sum(0))
        x = (1 - study.methods.DECAY_PER_STEP) * x - lr * y
    assert model.weight.detach().numpy()[0] == pytest.approx(x, abs=1e-6)


def test_full_range_ends_at_the_largest_element(study: Any) -> None:
    run = study.methods.Run(lr=1e-3, workers=2, steps=1, seed=0)
    method = study.methods.build_method("quantized-4-linf-full", torch.nn.Linear(2, 2), run)
    (group,) = method.optimizer.param_groups
    rule = group["aggregation"]
    # s * step * 2^(p - 1) is s, the largest element.
    assert (rule.bits, rule.norm, rule.step * 2**3) == (4, "linf", 1.0)


def test_median_lion_moves_by_the_median(study: Any) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.zero_()
    run = study.methods.Run(lr=0.5, workers=3, steps=1, seed=0)
    method = study.methods.build_method("median-lion", model, run)
    for worker, grad in enumerate(([1.0, -1.0], [2.0, -2.0], [-900.0, 900.0])):
        model.weight.grad = torch.tensor([grad])
        method.collect(worker)
    method.step()
    assert model.weight.tolist() == [[-0.5, 0.5]]


def test_weights_decay_alike_whatever_the_rate(study: Any) -> None:
    for name in ("majority", "global-adamw", "median-lion"):
        for lr in (1e-3, 4e-3):
            run = study.methods.Run(lr=lr, workers=2, steps=1, seed=0)
            method = study.methods.build_method(name, torch.nn.Linear(2, 2), run)
            (group,) = method.optimizer.param_groups
            assert group["lr"] * group["weight_decay"] == pytest.approx(1e-4)


# Runs and records


@pytest.mark.parametrize("method", ["majority", "shared-average", "global-adamw", "dgc"])
def test_run_has_the_same_bits_again(study: Any, images: Any, method: str) -> None:
    first, second = (run_tiny(study, images, method=method) for _ in range(2))
    assert first["parameters_sha256"] == second["parameters_sha256"]
    assert first["validation"] == second["validation"]
    assert [row[0] for row in first["validation"]] == [2, 3]


def test_tuning_leaves_test_data_alone(
    study: Any, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(study.images.ImageTask, "test", lambda *_: asked.append(1))
    assert run_tiny(study, images, is_tuning=True)["test"] is None
    assert not asked


def test_byzantine_workers_change_a_run(study: Any, images: Any) -> None:
    honest = run_tiny(study, images)
    attacked = run_tiny(study, images, attackers=1, factor=-1.0)
    assert honest["parameters_sha256"] != attacked["parameters_sha256"]


def test_diverged_run_is_recorded(study: Any, images: Any) -> None:
    outcome = run_tiny(study, images, method="global-sgd", lr=1e30, steps=6)
    assert outcome["diverged"]["step"] < 6
    assert outcome["test"] is None


def perform(study: Any, records: Any, data: Any, config: Any) -> bool:
    did: bool = study.work.perform(records, config, partial(study.program.make, data))
    return did


def test_recorded_run_is_not_run_again(study: Any, images: Any, tmp_path: Path) -> None:
    records, data = study.archive.Records(tmp_path), TinyData(study, images)
    config = make_config(study)
    assert perform(study, records, data, config)
    assert not perform(study, records, data, config)
    assert [path.name for path in tmp_path.iterdir()] == [f"{config.name}.json"]


def test_run_of_another_process_is_left_to_it(study: Any, images: Any, tmp_path: Path) -> None:
    records, data = study.archive.Records(tmp_path), TinyData(study, images)
    config = make_config(study)
    with records.claim(config.name) as is_ours:
        assert is_ours
        assert not perform(study, records, data, config)
    assert perform(study, records, data, config)


def test_queue_tunes_and_then_runs_all_seeds(study: Any, images: Any, tmp_path: Path) -> None:
    setting = study.cells.Setting("images", 2, 8, 1, {"width": 4, "groups": 2})
    cell = study.cells.Cell(setting, "majority", 4)
    part = study.plan.Part("tiny", "Tiny", (cell,))
    records = study.archive.Records(tmp_path)
    study.program.run_all(records, TinyData(study, images), [part])
    ending = study.evidence.Ending.find(cell, records.read)
    made = records.read_all()
    assert ending.is_whole
    assert len(made) == len(ending.choice.losses) + 3
    assert {record["config"]["lr"] for record in made if record["test"]} == {ending.choice.rate}


def test_repeat_finds_a_bit_that_differs(
    study: Any, images: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, data = study.archive.Records(tmp_path), TinyData(study, images)
    config = make_config(study)
    perform(study, records, data, config)
    assert study.program.repeat(records, data, config.name) == 0
    record = records.read(config.name)
    record["parameters_sha256"] = "0" * 64
    records.path(config.name).write_text(json.dumps(record))
    assert study.program.repeat(records, data, config.name) == 1
    assert "parameters_sha256" in capsys.readouterr().out


# Reports


def make_records(study: Any, folder: Path, errors: Mapping[str, tuple[float, ...]]) -> Any:
    """Write records as if some methods of images-4 had ended with these errors, a seed each."""
    records = study.archive.Records(folder)
    for cell in study.plan.PARTS[0].cells:
        for power in (-1, 0, 1) if cell.method in errors else ():
            run = cell.tuning(float(f"{cell.center * 2.0**power:.4g}"))
            records.write(run, make_outcome(study, run, loss=1 + abs(power), error=50))
        for seed, error in enumerate(errors.get(cell.method, ()), start=1):
            run = cell.config(cell.center, seed, is_tuning=False)
            records.write(run, make_outcome(study, run, loss=1.0, error=error))
    return records


def make_outcome(study: Any, config: Any, *, loss: float, error: float) -> dict[str, Any]:
    units = np.ones(1000)
    units[: round(10 * error)] = 0
    test = {"loss": loss, "accuracy": 1 - error / 100, "units": study.scoring.pack_units(units)}
    return {
        "config": vars(config),
        "diverged": None,
        "validation": [[5, loss, 0.5], [10, loss, 0.5]],
        "test": None if config.is_tuning else test,
        "bits_up": 1.0,
        "bits_down": 1.0,
        "cpu_s": 1.0,
    }


def test_program_reports_by_default(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    try:
        words = ["--records", str(tmp_path / "runs"), "--results", str(tmp_path)]
        assert study.program.main(words) == 0
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.strip() == str(tmp_path / "study.md")
    assert (tmp_path / "study.md").read_text().startswith("# The study")


def test_report_of_no_records_says_what_is_missing(study: Any, tmp_path: Path) -> None:
    records = study.archive.Records(tmp_path / "runs")
    report = study.report.write_report(records, tmp_path).read_text()
    assert "0 runs" in report
    assert "| images-4 | 0 of 11 | 33 | global-adamw, global-lion, majority" in report


def test_report_counts_no_records_of_another_study(study: Any, tmp_path: Path) -> None:
    records = make_records(study, tmp_path / "runs", {"majority": (33.1, 33.3, 32.8)})
    before = study.report.write_report(records, tmp_path).read_text()
    assert "6 runs" in before
    known = study.plan.PARTS[0].cells[0].tuning(0.004)
    foreign = replace(known, method="global-adamw-betas-90-99"), replace(known, steps=17)
    for config in foreign:
        records.write(config, make_outcome(study, config, loss=1.0, error=50))
    on_gpu = make_outcome(study, known, loss=1.0, error=50) | {"device": "a GPU"}
    del on_gpu["cpu_s"]
    records.write(replace(known, seed=5), on_gpu | {"config": vars(replace(known, seed=5))})
    assert len(records.read_all()) == 9
    assert study.report.write_report(records, tmp_path).read_text() == before


def test_report_decides_by_the_bounds_and_nothing_before_all_seeds(
    study: Any, tmp_path: Path
) -> None:
    errors = {
        "global-adamw": (30.0, 30.2, 29.8),
        "majority": (33.1, 33.3, 32.8),
        "shared-majority": (30.1, 30.2, 30.1),
        "average": (30.0, 30.2),
    }
    records = make_records(study, tmp_path / "runs", errors)
    report = study.report.write_report(records, tmp_path).read_text()
    lines = [line for line in report.splitlines() if "| images-4 | 4 |" in line]
    (majority,) = [line for line in lines if "majority vote matches global AdamW" in line]
    assert "+3.07 ± 0.06" in majority
    assert majority.endswith("does not hold |")
    (shared,) = [line for line in lines if "after the vote matches global AdamW" in line]
    assert shared.endswith("| holds |")
    (average,) = [line for line in lines if "Average matches global AdamW" in line]
    assert "(2 of 3 seeds)" in average
    assert average.endswith("| not yet run |")
    assert (tmp_path / "study_endings.png").stat().st_size > 1000


def test_committed_records_are_of_the_plan_and_of_committed_sources(study: Any) -> None:
    for path in RECORDS.glob("*.json"):
        record = json.loads(path.read_text())
        assert study.runs.RunConfig(**record["config"]).name == path.stem
        assert not record["dirty"], path.name
        assert (record["test"] is None) == (record["config"]["seed"] == 0), path.name
