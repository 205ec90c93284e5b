"""Attacks do what they say, runs repeat, and the table says what the runs say."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from distlion.virtual import VirtualCluster
from distlion_lab.tasks.base import batch_loss
from programs import imported_program

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")

# Float32 sums over 8 images of 5 positions in another order, relative to the largest gradient of a
# parameter; 6e-7 was seen.
OTHER_ORDER = 1e-5


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    """The modules ``attackers`` and ``summary``, and the program."""
    with imported_program("byzantine", "attackers", "summary") as found:
        yield found


@pytest.fixture(scope="module")
def attackers(parts: Any) -> Any:
    return parts[0]


@pytest.fixture(scope="module")
def summary(parts: Any) -> Any:
    return parts[1]


@pytest.fixture(scope="module")
def program(parts: Any) -> Any:
    return parts[2]


@pytest.fixture(scope="module")
def result(attackers: Any, summary: Any, program: Any) -> Any:
    runs = program.plan_study(dict.fromkeys(attackers.METHODS, 1e-3), 9, 3, 100)
    outcomes = [
        (run, attackers.Outcome(1.0, 0.9 - 0.1 * run.byzantine + 0.01 * run.seed)) for run in runs
    ]
    return {"conditions": {"workers": 9}, "summary": summary.summarize(outcomes)}


def make_run(module: Any, **changes: Any) -> Any:
    plain = {"method": "MajorityVote()", "attack": "flip", "byzantine": 1, "workers": 3}
    return module.Run(**{**plain, "seed": 0, "lr": 1e-3, "steps": 2, **changes})


def draw_grad(seed: int, n: int = 200) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


class TestAttacks:
    def test_flip_and_scale(self, attackers: Any) -> None:
        grad, generator = draw_grad(0), torch.Generator()
        assert torch.equal(attackers.flip(grad, generator), -grad)
        assert torch.equal(attackers.scale(grad, generator), -100 * grad)

    def test_randomize_keeps_the_norm_and_nothing_else(self, attackers: Any) -> None:
        grad = draw_grad(0)
        noise = attackers.randomize(grad, torch.Generator().manual_seed(1))
        assert float(noise.norm()) == pytest.approx(float(grad.norm()), rel=1e-5)
        # The cosine of independent directions has a standard deviation of 1 / sqrt(200) = 0.07.
        assert abs(float(noise @ grad)) < 0.3 * float(grad.norm()) ** 2

    @pytest.mark.parametrize("attack", ["flip", "randomize", "scale"])
    def test_only_the_first_workers_are_byzantine(self, attackers: Any, attack: str) -> None:
        before = torch.stack([draw_grad(seed) for seed in range(4)])
        grads = {"a": before.clone()}
        attackers.corrupt_(
            grads, make_run(attackers, attack=attack, byzantine=2, workers=4), step=0
        )
        same = [torch.equal(*pair) for pair in zip(grads["a"], before, strict=True)]
        assert same == [False, False, True, True]

    # A power of two changes neither a rounding nor a sign; with -100 a few votes may differ.
    @pytest.mark.parametrize("factor", [-1.0, -128.0])
    @pytest.mark.parametrize(
        "rule", [distlion.MajorityVote(), distlion.TernaryVote(), distlion.QuantizedVote(bits=2)]
    )
    def test_votes_of_a_worker_that_always_flips_are_exactly_flipped(
        self, rule: Any, factor: float
    ) -> None:
        voted, alone = nn.Parameter(torch.zeros(200)), nn.Parameter(torch.zeros(200))
        cluster = VirtualCluster([voted], workers=3, lr=0.1, aggregation=rule)
        lion = distlion.Lion([alone], lr=0.1)
        for step in range(5):
            # The flipped votes take away the first worker's, so that the third decides alone.
            honest, other = draw_grad(step), draw_grad(100 + step)
            for worker, grad in enumerate((honest, factor * honest, other)):
                voted.grad = grad
                cluster.collect(worker)
            cluster.step()
            alone.grad = other
            lion.step()
        assert torch.equal(voted.detach(), alone.detach())


class TestTraining:
    def test_gradients_are_those_of_each_worker_alone(self, attackers: Any) -> None:
        task, model = attackers.load_task(), attackers.build_model(0)
        batches = [
            task.training_batch(seed=0, step=0, rank=rank, world_size=2) for rank in range(2)
        ]
        together = attackers.gradients(model, batches)
        for worker, batch in enumerate(batches):
            model.zero_grad()
            batch_loss(model, batch).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                error = (together[name][worker] - param.grad).abs().max()
                assert error <= OTHER_ORDER * max(float(param.grad.abs().max()), 1e-3)

    @pytest.mark.parametrize("method", ["MajorityVote()", "Lion on the mean gradient"])
    def test_run_repeats(self, attackers: Any, method: str) -> None:
        run = make_run(attackers, method=method, attack="randomize")
        first = attackers.train(run)
        assert first == attackers.train(run)
        assert 0.0 <= first.accuracy <= 1.0
        assert first != attackers.train(make_run(attackers, method=method, attack="flip"))

    def test_learning_rate_rises_then_falls(self, attackers: Any) -> None:
        factors = [attackers.lr_factor(step, 100) for step in range(100)]
        assert max(factors) == factors[9]
        assert 0 < factors[-1] < 0.02


class TestStudy:
    def test_runs_without_byzantine_workers_are_there_once(
        self, attackers: Any, program: Any
    ) -> None:
        runs = program.plan_study(dict.fromkeys(attackers.METHODS, 1e-3), 9, 3, 100)
        assert len(runs) == len(set(runs)) == 6 * 3 * (1 + 3 * 4)
        assert {run.attack for run in runs if run.byzantine == 0} == {"flip"}

    def test_each_method_takes_the_lr_with_the_least_loss(
        self, attackers: Any, program: Any
    ) -> None:
        runs = program.plan_tuning(9, 100)
        outcomes = [
            (run, attackers.Outcome(abs(run.lr - 3.9e-3) + 0.01 * len(run.method), 0.0))
            for run in runs
        ]
        assert program.choose_lrs(outcomes) == dict.fromkeys(attackers.METHODS, 4e-3)

    def test_summary_is_over_seeds(self, attackers: Any, result: Any) -> None:
        for attack in attackers.ATTACKS:
            for method in attackers.METHODS:
                cells = result["summary"][attack][method]
                assert list(cells) == ["0", "1", "2", "3", "4"]
                assert cells["2"]["mean"] == pytest.approx(0.71)
                assert cells["2"]["sd"] == pytest.approx(0.01)
                assert (cells["2"]["least"], cells["2"]["most"]) == pytest.approx((0.7, 0.72))

    def test_markdown_says_what_the_summary_says(self, summary: Any, result: Any) -> None:
        lines = summary.write_markdown(result).splitlines()
        rows = [line for line in lines if line.startswith("| MajorityVote() |")]
        expected = " | ".join(f"{mean} ± 1.0" for mean in ("91.0", "81.0", "71.0", "61.0", "51.0"))
        assert rows == [f"| MajorityVote() | {expected} |"] * 3

    def test_figure_has_a_panel_for_each_attack(
        self, attackers: Any, summary: Any, result: Any
    ) -> None:
        figure = summary.draw(result)
        figure.savefig(io.BytesIO(), format="png")
        assert [axes.get_title() for axes in figure.axes] == list(attackers.ATTACKS)
        assert set(summary.STYLES) == set(attackers.METHODS)
