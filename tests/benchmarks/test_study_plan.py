"""The study's plan: learning rates, and differences that decide."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import distlion

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

# Rates


def tune(study: Any, losses: Mapping[float, float], method: str = "majority") -> Any:
    """Choose a rate where runs end with the losses given; others are not there."""
    cell = study.cells.Cell(study.plan.IMAGES, method, 4)
    found = {
        cell.tuning(rate).name: {"diverged": None, "validation": [[1, loss, 0.5]]}
        for rate, loss in losses.items()
    }
    return study.cells.choose_rate(cell, found.get)


def test_three_rates_are_tried_first(study: Any) -> None:
    assert [run.lr for run in tune(study, {}).wanted] == [2e-4, 4e-4, 8e-4]


def test_rate_inside_the_grid_is_taken(study: Any) -> None:
    choice = tune(study, {2e-4: 1.0, 4e-4: 0.9, 8e-4: 1.1})
    assert (choice.rate, choice.wanted, choice.at_edge) == (4e-4, (), False)


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ({2e-4: 0.8, 4e-4: 0.9, 8e-4: 1.1}, (1e-4,)),
        ({2e-4: 1.0, 4e-4: 0.9, 8e-4: 0.8}, (1.6e-3,)),
    ],
)
def test_grid_grows_while_the_best_rate_is_at_its_edge(
    study: Any, losses: dict[float, float], wanted: tuple[float, ...]
) -> None:
    choice = tune(study, losses)
    assert (choice.rate, tuple(run.lr for run in choice.wanted)) == (None, wanted)


def test_more_workers_begin_around_the_best_rate_of_four(study: Any) -> None:
    four = study.cells.Cell(study.plan.IMAGES, "majority", 4)
    eight = study.cells.Cell(study.plan.IMAGES, "majority", 8, centered_on=four)
    found = {
        four.tuning(rate).name: {"diverged": None, "validation": [[1, loss, 0.5]]}
        for rate, loss in {2e-4: 1.0, 4e-4: 1.1, 1e-4: 1.2}.items()
    }
    waiting = study.cells.list_open(eight, found.get)
    assert waiting == [four.tuning(8e-4)]
    found[four.tuning(8e-4).name] = {"diverged": None, "validation": [[1, 1.3, 0.5]]}
    assert study.cells.list_open(eight, found.get) == [eight.tuning(r) for r in (1e-4, 2e-4, 4e-4)]


def test_every_cell_of_more_workers_begins_where_four_ended(study: Any) -> None:
    """Or it has the rate of four; those cells are the very ones that are tuned."""
    cells = list(study.plan.list_cells())
    tuned_here = set()
    for cell in cells:
        source = cell
        while source.tuned_as is not None:
            source = source.tuned_as
        if source.workers > 4:
            tuned_here.add((source.method, source.workers))
            source = source.centered_on
        assert source in cells or source.workers == 0
    votes = ("majority", "majority-betas-90-95")
    expected = {(method, workers) for method in votes for workers in (8, 32)}
    assert tuned_here == expected | {("terngrad-adamw", 8), ("dgc", 8)}


@pytest.mark.parametrize(
    ("method", "kin"),
    [
        ("average", "majority"),
        ("majority-full-vectors", "majority"),
        ("majority-betas-90-95", "signum"),
        ("global-lion-betas-90-95", "majority-betas-90-95"),
        ("global-adamw-betas-90-95", "global-adamw"),
        ("shared-average", "shared-majority"),
        ("terngrad-adamw", "global-adamw"),
        ("dgc", "global-sgd"),
        ("majority", None),
        ("shared-majority", None),
        ("global-lion", None),
        ("quantized-2-betas-90-95", "majority-betas-90-95"),
        ("majority-decay-0-betas-90-95", "majority-betas-90-95"),
        ("majority-local-50-shared-90", "shared-majority"),
    ],
)
def test_grids_begin_where_the_nearest_kin_ended(study: Any, method: str, kin: str | None) -> None:
    cells = [
        cell
        for cell in study.plan.list_cells()
        if cell.method == method
        and cell.setting in (study.plan.IMAGES, study.plan.TEXT)
        and cell.workers in (0, 4)
        and cell.tuned_as is None
    ]
    assert cells
    for cell in cells:
        assert (cell.centered_on.method if cell.centered_on else None) == kin
        assert cell.centered_on is None or cell.centered_on.setting == cell.setting


@pytest.mark.parametrize(
    ("method", "n_chosen"), [("majority-full-vectors", 2), ("majority-ternary-embeddings", 20)]
)
def test_some_parameters_have_a_rule_of_their_own(study: Any, method: str, n_chosen: int) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 2), torch.nn.Linear(2, 2))
    run = study.methods.Run(lr=1e-3, workers=2, steps=10, seed=0)
    first, second = study.methods.build_method(method, model, run).optimizer.param_groups
    assert isinstance(first["aggregation"], distlion.MajorityVote)
    assert not isinstance(second["aggregation"], distlion.MajorityVote)
    assert sum(param.numel() for param in second["params"]) == n_chosen


@pytest.mark.parametrize(
    "method",
    [
        *("majority", "global-lion", "global-adamw", "quantized-2", "quantized-4-linf-full"),
        *("majority-full-vectors", "majority-ternary-embeddings"),
    ],
)
def test_betas_are_those_of_the_name(study: Any, method: str) -> None:
    run = study.methods.Run(lr=1e-3, workers=1, steps=10, seed=0)
    name, model = f"{method}-betas-95-98", torch.nn.Sequential(torch.nn.Embedding(3, 2))
    model.append(torch.nn.Linear(2, 2))
    groups = study.methods.build_method(name, model, run).optimizer.param_groups
    plain = study.methods.build_method(method, model, run).optimizer.param_groups
    assert len(groups) == len(plain) == (2 if method.startswith("majority-") else 1)
    for group, other in zip(groups, plain, strict=True):
        assert group["betas"] == (0.95, 0.98) != other["betas"]
        assert group["weight_decay"] == other["weight_decay"] == pytest.approx(0.1)
        assert group.get("aggregation") == other.get("aggregation")
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(distlion.errors.InvalidArgumentError, match="betas"):
        study.methods.build_method("dgc-betas-95-98", linear, run)


def test_rate_that_stays_at_the_edge_is_marked(study: Any) -> None:
    rates = [float(f"{2e-4 * 2**power:.4g}") for power in range(7)]
    choice = tune(study, {rate: -rate for rate in rates})
    assert (choice.rate, choice.at_edge) == (rates[-1], True)


def test_diverged_rate_is_worse_than_all_others(study: Any) -> None:
    cell = study.cells.Cell(study.plan.IMAGES, "majority", 4)
    ends = {2e-4: 5.0, 4e-4: 4.0, 8e-4: math.nan}
    found = {
        cell.tuning(rate).name: {
            "diverged": {"step": 1} if math.isnan(loss) else None,
            "validation": [[1, loss, 0.1]],
        }
        for rate, loss in ends.items()
    }
    assert study.cells.choose_rate(cell, found.get).rate == 4e-4


def test_cells_of_the_plan_are_distinct_and_their_methods_exist(study: Any) -> None:
    cells = list(study.plan.list_cells())
    names = [cell.config(1e-3, 1, is_tuning=False).name for cell in cells]
    assert len(set(names)) == len(names)
    run = study.methods.Run(lr=1e-3, workers=2, steps=10, seed=0)
    for method in {cell.method for cell in cells}:
        assert study.methods.build_method(method, torch.nn.Linear(2, 2), run).optimizer


# Differences and verdicts


def test_bound_over_seeds_is_students(study: Any) -> None:
    by_unit = np.repeat([[1.0], [2.0], [3.0]], 50, axis=1)
    # The 95 % quantile of Student's t with 2 degrees of freedom, from a printed table.
    assert study.evidence.half_width(by_unit) == pytest.approx(2.920 / math.sqrt(3), rel=1e-3)


def test_bound_over_examples_counts_where_seeds_agree(study: Any) -> None:
    by_unit = np.tile([0.0, 2.0], (3, 50))
    deviation = math.sqrt(100 / 99)
    assert study.evidence.half_width(by_unit) == pytest.approx(1.645 * deviation / 10, rel=1e-3)


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.5, 0.4, "PAR"),
        (0.5, 0.6, "UNDECIDED"),
        (1.5, 0.6, "BEHIND"),
        (-0.5, 0.6, "PAR"),
        (-0.5, 0.4, "AHEAD"),
        (0.1, 3.0, "UNDECIDED"),
    ],
)
def test_verdict_follows_the_bounds(study: Any, mean: float, half: float, verdict: str) -> None:
    assert study.evidence.decide(mean, half, margin=1.0).name == verdict


@pytest.mark.parametrize("units", [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0], [1.25, 2.5]])
def test_units_survive_packing(study: Any, units: list[float]) -> None:
    packed = json.loads(json.dumps(study.scoring.pack_units(np.array(units))))
    assert study.scoring.unpack_units(packed).tolist() == units


@pytest.mark.parametrize(
    ("verdict", "of_a_par", "of_ahead"),
    [
        ("AHEAD", "holds", "holds"),
        ("PAR", "holds", "not shown: on a par"),
        ("BEHIND", "does not hold", "does not hold"),
        ("UNDECIDED", "undecided", "undecided"),
        ("OPEN", "not yet run", "not yet run"),
    ],
)
def test_a_claim_is_answered_by_what_was_decided(
    study: Any, verdict: str, of_a_par: str, of_ahead: str
) -> None:
    found = SimpleNamespace(verdict=study.evidence.Verdict[verdict])
    claims = [study.claims.Claim("us", "it", wants_ahead=wants) for wants in (False, True)]
    assert [study.claims.holds(claim, found) for claim in claims] == [of_a_par, of_ahead]
