"""The federated study: its plan, a run of it on made-up images, and how it decides."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("design", "report", "client_cost", "training", "study_path", "images", "scoring")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import its modules, whose names other studies have too."""
    kept = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "study"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "federated"))
    import client_cost
    import design
    import images

    import report
    import training

    yield SimpleNamespace(
        cost=client_cost, design=design, images=images, report=report, training=training
    )
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


class Made:
    """Records of runs, made up as they are asked for."""

    def __init__(self, tests: dict[str, float], best: int = -1) -> None:
        self.tests, self.best = tests, best
        self.records: dict[str, dict[str, Any]] = {}

    def read(self, cell: Any) -> dict[str, Any] | None:
        return self.records.get(cell.name)

    def make(self, cell: Any) -> None:
        self.records[cell.name] = {
            "validation": 1 - abs(cell.exponent - self.best) / 10 - abs(cell.local_rate - 0.05),
            "test": self.tests[cell.method] + cell.seed / 1000,
            "payload_bytes": 1,
        }


def play(study: Any, made: Made) -> list[Any]:
    """Do what is open until nothing is; return the runs in order."""
    done = []
    while cells := study.design.list_open(made.read):
        done.append(cells[0])
        made.make(cells[0])
    return done


def test_the_plan_tunes_and_reports_every_condition(study: Any) -> None:
    made = Made(dict.fromkeys(study.design.METHODS, 0.5))
    done = play(study, made)
    assert len({cell.name for cell in done}) == len(done)
    reported = [cell for cell in done if cell.seed > 0]
    assert len(reported) == 4 * 2 * 2 * 3
    assert {(cell.exponent, cell.local_rate, cell.rounds) for cell in reported} == {(-1, 0.05, 200)}
    tuned = [cell for cell in done if cell.seed == 0]
    assert {cell.exponent for cell in tuned} == {-2, -1, 0}
    assert {cell.rounds for cell in tuned} == {100}


@pytest.mark.parametrize(("best", "chosen"), [(-3, -3), (-9, -4), (1, 1), (9, 2)])
def test_a_grid_grows_while_the_best_rate_is_at_its_edge(
    study: Any, best: int, chosen: int
) -> None:
    done = play(study, Made(dict.fromkeys(study.design.METHODS, 0.5), best))
    assert {cell.exponent for cell in done if cell.seed} == {chosen}


@pytest.mark.parametrize(
    ("tests", "default"),
    [
        ({"stochastic": 0.592, "majority": 0.7, "residual": 0.7}, "stochastic"),
        ({"stochastic": 0.588, "majority": 0.595, "residual": 0.599}, "residual"),
        ({"stochastic": 0.5, "majority": 0.5, "residual": 0.5}, "none"),
    ],
)
def test_the_default_follows_the_protocol(
    study: Any, tests: dict[str, float], default: str
) -> None:
    made = Made({"fedavg": 0.6, **tests})
    assert study.report.choose_default(study.report.collect(made.read)) == "open"
    play(study, made)
    assert study.report.choose_default(study.report.collect(made.read)) == default
    page = study.report.describe(made.read)
    assert f"Default by the rule of the protocol: {default}." in page
    assert "| fedavg | 1 | 60.2 ± 0.1 |" in page


def make_images(study: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def labeled(n: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(n) % 10
        pixels = torch.randn(n, 3, size, size, generator=generator)
        return (pixels + labels.view(-1, 1, 1, 1) / 3).half(), labels

    return study.images.Images(labeled(3000, 40), labeled(100, 32), labeled(100, 32), "made up")


@pytest.mark.parametrize("method", ["fedavg", "stochastic", "majority", "residual"])
def test_a_run_trains_and_repeats_itself(study: Any, method: str) -> None:
    data = make_images(study)
    cell = study.design.Cell(method, None, 3, -1, 0.05, 1, 3)
    records = [study.training.train(cell, data) for _ in range(2)]
    for record in records:
        del record["cpu_s"]
    assert records[0] == records[1]
    assert records[0]["finished"]
    network = study.images.build_network(**study.design.NETWORK, seed=0)
    bits = 8 * records[0]["payload_bytes"] / sum(param.numel() for param in network.parameters())
    assert bits == 32 if method == "fedavg" else 1 < bits < 1.03


def test_a_run_that_diverges_scores_nothing(study: Any) -> None:
    cell = study.design.Cell("stochastic", None, 2, 2, 1e30, 1, 2)
    record = study.training.train(cell, make_images(study))
    assert (record["finished"], record["test"]) == (False, 0.0)


def test_the_cost_of_a_client_is_measured_for_all_methods(
    study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CLIENTS": 5, "PART": 2, "ROUNDS": 1, "LOCAL_STEPS": 1, "BATCH": 2}.items():
        monkeypatch.setattr(study.cost, name, value)
    page = study.cost.describe(study.cost.measure())
    assert all(f"| {method} |" in page for method in study.design.METHODS)


def test_clients_of_fedavg_and_of_votes_are_the_same(study: Any) -> None:
    drawn = []
    for method in ("fedavg", "stochastic"):
        cell = study.design.Cell(method, None, 5, -1, 0.05, 3, 10)
        clients = study.training.make_clients(cell, torch.nn.Linear(2, 2))
        drawn.append(clients.draw(5))
    assert drawn[0] == drawn[1]
