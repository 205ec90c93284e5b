"""The problem has the solution that it claims, and the tables say what was measured."""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from programs import imported_program

pytest.importorskip("matplotlib")

N = 16
BOUND = 0.5
# Sums of 16 numbers around 1, in double.
DOUBLE = 1e-12


@pytest.fixture(scope="module")
def theory() -> Any:
    with imported_program("theory", "theory_report") as (_, program):
        yield program


@pytest.fixture(scope="module")
def styles(theory: ModuleType) -> Any:
    return sys.modules[theory.draw.__module__].STYLES


@pytest.fixture(scope="module")
def problem(theory: ModuleType) -> Any:
    return theory.make_problem(N, BOUND, seed=3)


@pytest.fixture(scope="module")
def result(theory: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theory, "OUTSIDE_STEPS", 3)
        measured = theory.measure(steps=5, n=8, seeds=2)
    return {"conditions": theory.read_conditions(5, seeds=2), **measured}


def points_in_the_box(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return BOUND * (2 * torch.rand(count, N, generator=generator, dtype=torch.float64) - 1)


class TestProblem:
    def test_solution_is_on_the_edge_in_half_of_the_elements(self, problem: Any) -> None:
        size = problem.solution.abs()
        assert (size[::2] == BOUND).all()
        assert (size[1::2] <= 0.8 * BOUND).all()

    def test_no_direction_within_the_box_leads_down_from_the_solution(self, problem: Any) -> None:
        g = problem.gradient(problem.solution)
        assert g.abs().max() > 0.1
        for point in points_in_the_box(100):
            assert g @ (point - problem.solution) >= -DOUBLE

    def test_gradient_is_that_of_a_convex_function(self, problem: Any) -> None:
        assert torch.linalg.eigvalsh(problem.hessian).min() > 0.04

    def test_surrogate_is_zero_at_the_solution_and_positive_elsewhere(self, problem: Any) -> None:
        assert abs(problem.surrogate(problem.solution)) <= DOUBLE
        assert problem.error(problem.solution) == 0.0
        assert all(problem.surrogate(point) > 0.1 for point in points_in_the_box(100))

    def test_distance_to_the_box(self, problem: Any) -> None:
        assert problem.outside(problem.solution) == 0.0
        assert problem.outside(torch.tensor([0.1, -2.0], dtype=torch.float64)) == 1.5


class TestRun:
    def test_one_worker_does_the_same_under_every_rule(self, theory: Any, problem: Any) -> None:
        columns = [
            theory.run(problem, theory.SCENARIOS[0], rule, start=torch.zeros(N), steps=20)
            for rule in theory.RULES.values()
        ]
        assert all(each == columns[0] for each in columns)

    def test_surrogate_and_error_fall(self, theory: Any, problem: Any) -> None:
        rule = theory.RULES["MajorityVote()"]
        columns = theory.run(problem, theory.SCENARIOS[1], rule, start=torch.zeros(N), steps=150)
        row = theory.summarize(columns)
        assert row["final_surrogate"] < row["start_surrogate"] / 3
        assert columns["error"][-1] < columns["error"][0] / 2
        assert row["most_outside"] == 0.0

    def test_distance_shrinks_from_far_outside(self, theory: Any, problem: Any) -> None:
        start = 10 * problem.solution
        rule = theory.RULES["Average()"]
        columns = theory.run(problem, theory.SCENARIOS[1], rule, start=start, steps=20)
        # Rounding as bounded in tests/theory/test_box.py.
        slack = 4 * 2.0**-24 * (float(start.abs().max()) + theory.LR)
        for before, after in pairwise(columns["outside"]):
            assert after <= (1 - theory.LR / BOUND) * before + slack

    def test_shifts_differ_and_add_up_to_nothing(self, theory: Any) -> None:
        shifts = theory.draw_shifts(theory.SCENARIOS[-1], N, seed=0)
        assert shifts.shape == (16, N)
        assert shifts.sum(dim=0).abs().max() <= DOUBLE
        assert shifts.std(dim=0).min() > 0.1

    def test_same_data_means_no_shift(self, theory: Any) -> None:
        assert not theory.draw_shifts(theory.SCENARIOS[2], N, seed=0).any()


class TestSeeds:
    def test_a_seed_draws_the_noise(self, theory: Any, problem: Any) -> None:
        rule = theory.RULES["MajorityVote()"]
        first, second = (
            theory.run(problem, theory.SCENARIOS[1], rule, start=torch.zeros(N), steps=3, seed=seed)
            for seed in (0, 1)
        )
        assert first["surrogate"][0] == second["surrogate"][0]
        assert first["surrogate"][-1] != second["surrogate"][-1]

    def test_runs_of_all_seeds_become_mean_and_deviation(self, theory: Any) -> None:
        run = dict.fromkeys(("start_surrogate", *theory.SHOWN), 0.0)
        runs = [
            run
            | {
                "final_error": error,
                "least_surrogate": error,
                "most_outside": error,
                "curves": {"step": [0, 1], "error": [error, 2 * error]},
            }
            for error in (1.0, 2.0, 6.0)
        ]
        row = theory.combine(runs)
        assert (row["final_error"], row["least_surrogate"], row["most_outside"]) == (3.0, 1.0, 6.0)
        # The variance is (4 + 1 + 9) / 2.
        assert row["final_error_deviation"] == pytest.approx(7**0.5)
        assert row["curves"] == {"step": [0, 1], "error": [3.0, 6.0]}


class TestReport:
    def test_every_rule_is_measured_with_several_workers(self, theory: Any, result: Any) -> None:
        for scenario in theory.SCENARIOS[1:]:
            assert list(result["scenarios"][scenario.name]) == list(theory.RULES)
        assert list(result["from_outside"]) == list(theory.RULES)

    def test_markdown_says_what_the_json_says(self, theory: Any, result: Any) -> None:
        text = theory.write_markdown(result)
        for scenario, rules in result["scenarios"].items():
            for name, row in rules.items():
                shown = "every rule" if len(rules) == 1 else f"`{name}`"
                (line,) = (
                    line
                    for line in text.splitlines()
                    if line.startswith(f"| {scenario} | {shown} |")
                )
                cells = [cell.split("±") for cell in line.split("|")[3:6]]
                for (mean, deviation), (column, digits) in zip(
                    cells, theory.SHOWN.items(), strict=True
                ):
                    close = {"abs": 0.5 * 10.0**-digits}
                    assert float(mean) == pytest.approx(row[column], **close)
                    assert float(deviation) == pytest.approx(row[f"{column}_deviation"], **close)

    def test_figure_draws_every_rule(self, theory: Any, styles: Any, result: Any) -> None:
        figure = theory.draw(result)
        figure.savefig(io.BytesIO(), format="png")
        assert len(figure.axes) == 2 * len(theory.SCENARIOS)
        assert {len(axes.lines) for axes in figure.axes} == {1, len(styles)}
        # One line for two rules that move alike.
        assert set(styles) == set(theory.RULES) - {"TernaryVote()"}
