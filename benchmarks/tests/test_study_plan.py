"""The study: learning rates, differences that decide, decisions, and what is evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
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
    cells = [cell for cell in study.plan.list_cells() if cell.alpha is None or cell.tuned_as]
    tuned_here = set()
    for cell in cells:
        source = cell
        while source.tuned_as is not None:
            source = source.tuned_as
        if source.workers > 4:
            tuned_here.add((source.method, source.workers))
            source = source.centered_on
            if source.workers > 4:  # error feedback is not run with 4 on each task
                source = source.centered_on
        assert source in cells or source.workers == 0
    votes = ("majority", "majority-betas-90-95")
    expected = {(method, workers) for method in votes for workers in (8, 32)}
    others = ("terngrad-adamw", "dgc", *study.plan._FEEDBACKS)
    assert tuned_here == expected | {(method, 8) for method in others}


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


@pytest.mark.smoke
def test_cells_of_the_plan_are_distinct_and_their_methods_exist(study: Any) -> None:
    cells = list(study.plan.list_cells())
    # Skewed cells come twice, at the rates of even data and at their own.
    names = {(cell.config(1e-3, 1, is_tuning=False).name, cell.tuned_as is None) for cell in cells}
    assert len(names) == len(cells)
    run = study.methods.Run(lr=1e-3, workers=2, steps=10, seed=0)
    for method in {cell.method for cell in cells}:
        assert study.methods.build_method(method, torch.nn.Linear(2, 2), run).optimizer


def test_rates_of_skewed_classes_are_tuned_around_those_of_even_ones(study: Any) -> None:
    (cells,) = (part.cells for part in study.plan.PARTS if part.name == "skew-tuned")
    *cells, library = cells
    assert library.method == study.plan.LIBRARY_FEEDBACK_2
    assert library.tuned_as in cells
    for cell in cells:
        assert (cell.alpha, cell.tuned_as, cell.workers) == (0.1, None, 8)
        assert (cell.centered_on.alpha, cell.centered_on.workers) == (None, 8)
        assert cell.method.startswith(cell.centered_on.method)


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
        (0.5, 0.4, "MATCHES"),
        (0.5, 0.6, "INCONCLUSIVE"),
        (1.5, 0.6, "TRAILS"),
        (-0.5, 0.6, "MATCHES"),
        (-0.5, 0.4, "LEADS"),
        (0.1, 3.0, "INCONCLUSIVE"),
    ],
)
def test_verdict_follows_the_bounds(study: Any, mean: float, half: float, verdict: str) -> None:
    assert study.evidence.decide(mean, half, margin=1.0).name == verdict


@pytest.mark.parametrize("units", [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0], [1.25, 2.5]])
def test_units_survive_packing(study: Any, units: list[float]) -> None:
    packed = json.loads(json.dumps(study.scoring.pack_units(np.array(units))))
    assert study.scoring.unpack_units(packed).tolist() == units


@pytest.mark.parametrize(
    ("verdict", "of_a_match", "of_a_lead"),
    [
        ("LEADS", "holds", "holds"),
        ("MATCHES", "holds", "not shown: matches"),
        ("TRAILS", "does not hold", "does not hold"),
        ("INCONCLUSIVE", "inconclusive", "inconclusive"),
        ("OPEN", "not yet run", "not yet run"),
    ],
)
def test_a_claim_is_answered_by_what_was_decided(
    study: Any, verdict: str, of_a_match: str, of_a_lead: str
) -> None:
    found = SimpleNamespace(verdict=study.evidence.Verdict[verdict])
    claims = [study.claims.Claim("us", "it", wants_lead=wants) for wants in (False, True)]
    assert [study.claims.holds(claim, found) for claim in claims] == [of_a_match, of_a_lead]


# Decisions


def make_comparison(study: Any, verdict: str, *, mean: float = -3.0, alpha: float = 0.1) -> Any:
    method = SimpleNamespace(cell=SimpleNamespace(alpha=alpha))
    return SimpleNamespace(verdict=study.evidence.Verdict[verdict], mean=mean, method=method)


def decide_for_library(study: Any, **found: Any) -> list[str]:
    """Return the answers where each part has one comparison, ``LEADS`` if it is not given."""

    def compare(part: str, method: str, reference: str) -> list[Any]:
        ahead = [make_comparison(study, "LEADS", alpha=alpha) for alpha in (0.1, 1.0)]
        if part == "skew" and method != "majority-betas-90-95":
            mine: list[Any] = found.get(method.partition("-")[0], ahead)
            return mine
        return [found.get(part.replace("-", "_"), make_comparison(study, "LEADS"))]

    found_by = SimpleNamespace(compare=compare)
    return [each.answer for each in study.decisions.list_decisions(found_by)]


def test_betas_change_only_where_all_parts_are_ahead_and_the_long_one_by_far(study: Any) -> None:
    assert decide_for_library(study)[0] == "yes"
    for part in ("confirmation", "images_8", "text_8", "images_32", "skew"):
        for verdict in ("MATCHES", "TRAILS", "INCONCLUSIVE"):
            found = make_comparison(study, verdict)
            assert decide_for_library(study, **{part: found})[0] == "no"
        assert decide_for_library(study, **{part: make_comparison(study, "OPEN")})[0] == "not yet"
    for mean, answer in ((-2.39, "no"), (-2.4, "yes")):
        found = make_comparison(study, "LEADS", mean=mean)
        assert decide_for_library(study, confirmation=found)[0] == answer


def test_one_condition_that_fails_is_enough_for_a_no(study: Any) -> None:
    lost, open_ = make_comparison(study, "LEADS", mean=-1.0), make_comparison(study, "OPEN")
    assert decide_for_library(study, confirmation=lost, skew=open_)[0] == "no"


def test_momentum_after_the_vote_must_be_ahead_where_classes_are_most_skewed(study: Any) -> None:
    for verdict, answer in (("LEADS", "yes"), ("MATCHES", "no"), ("OPEN", "not yet")):
        found = [make_comparison(study, verdict), make_comparison(study, "TRAILS", alpha=1.0)]
        assert decide_for_library(study, shared=found)[1] == answer
        tuned = make_comparison(study, verdict)
        assert decide_for_library(study, skew_tuned=tuned)[1] == answer


def test_error_feedback_must_be_ahead_of_averages_but_where_skew_is_mild(study: Any) -> None:
    for verdict, answer, mildly in (
        ("LEADS", "yes", "yes"),
        ("MATCHES", "no", "yes"),
        ("INCONCLUSIVE", "no", "no"),
        ("OPEN", "not yet", "not yet"),
    ):
        tuned = make_comparison(study, verdict)
        assert decide_for_library(study, skew_tuned=tuned)[2] == answer
        found = [make_comparison(study, verdict, alpha=1.0), make_comparison(study, "TRAILS")]
        assert decide_for_library(study, feedback=found)[2] == mildly


def test_what_no_runs_are_compared_in_is_not_decided(study: Any) -> None:
    only_mild = [make_comparison(study, "LEADS", alpha=1.0)]
    assert decide_for_library(study, shared=only_mild)[1] == "not yet"


def test_decisions_ask_of_the_parts_of_the_plan(study: Any) -> None:
    decisions = list(study.decisions.list_decisions(study.claims.Study({}.get)))
    assert [each.answer for each in decisions] == ["not yet"] * 3
    assert [len(each.conditions) for each in decisions] == [6, 2, 2]


# Evidence


@pytest.mark.parametrize(
    ("part", "method", "marked"),
    [
        ("images-8", "quantized-2", True),
        ("images-8", "majority", False),
        ("skew", "quantized-2", True),
        ("skew", "majority", False),
        ("skew", "global-adamw", False),
        ("skew-tuned", "shared-majority", False),
        ("confirmation", "majority", False),
    ],
)
def test_rate_of_fewer_workers_is_marked(study: Any, part: str, method: str, marked: bool) -> None:
    (cells,) = (each.cells for each in study.plan.PARTS if each.name == part)
    cell = next(each for each in cells if each.method == method)
    ending = study.evidence.Ending(cell, study.cells.Choice({}, (), 1e-3, False), {})
    assert study.report._rate(ending) == ("0.001 (that of 4)" if marked else "0.001")


def make_ending(study: Any, *, diverged: int | None) -> Any:
    """Return an ending of three seeds, one of which may have diverged."""
    cell = study.cells.Cell(study.plan.IMAGES, "majority", 4)
    choice = study.cells.Choice({}, (), 1e-3, False)
    test = {"units": study.scoring.pack_units(np.array([0.0, 1.0, 1.0]))}
    lost = {"diverged": {"step": 1}, "test": None}
    whole = {"diverged": None, "test": test}
    records = {seed: lost if seed == diverged else whole for seed in (1, 2, 3)}
    return study.evidence.Ending(cell, choice, records)


@pytest.mark.parametrize(
    ("method", "reference", "verdict"),
    [(1, None, "TRAILS"), (1, 2, "TRAILS"), (None, 2, "LEADS"), (None, None, "MATCHES")],
)
def test_whoever_diverges_is_behind(
    study: Any, method: int | None, reference: int | None, verdict: str
) -> None:
    endings = [make_ending(study, diverged=seed) for seed in (method, reference)]
    assert study.evidence.compare(*endings).verdict.name == verdict


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"dirty": True}, "commit first"),
        ({"dirty": False}, "install this checkout"),
    ],
)
def test_runs_that_would_be_no_evidence_are_refused(
    study: Any, place: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(study.archive, "describe_place", lambda: place)
    monkeypatch.setattr(study.archive, "REPOSITORY", tmp_path)
    with pytest.raises(SystemExit, match=said):
        study.archive.require_evidence()


def test_runs_of_committed_sources_are_evidence(
    study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.archive, "describe_place", lambda: {"dirty": False})
    study.archive.require_evidence()
