"""Workers of ``LocalSteps`` under the names of comparisons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import matrix
from distlion import VirtualLocalSteps
from distlion.errors import InvalidArgumentError
from distlion.votes.estimate import EstimateVote
from distlion_lab.training.methods import MethodKind, find_method
from distlion_lab.training.periodic import read_local_votes
from distlion_lab.training.workers import MethodRun
from drawn import draw_grads, make_params
from local_runs import SHAPES, are_equal, train_virtually

WORKERS, EVERY, STEPS, LR, DECAY = 3, 2, 5, 0.01, 0.1


def enter(name: str, params: Any, steps: int = STEPS) -> Any:
    run = MethodRun(
        list(params.items()), lr=LR, weight_decay=DECAY, workers=WORKERS, steps=steps, seed=3
    )
    return find_method(name).enter(run)


def take_steps(method: Any, params: Any, lrs: list[float]) -> None:
    for step, lr in enumerate(lrs):
        for group in method.optimizer.param_groups:
            group["lr"] = lr
        for worker in range(WORKERS):
            for param, grad in zip(
                params.values(), draw_grads(params.values(), worker, step), strict=True
            ):
                param.grad = grad
            method.collect(worker)
        method.step()


@pytest.mark.parametrize("name", matrix.DELTA_RULES)
@pytest.mark.parametrize("outer", ["", "-plain"])
def test_a_comparison_drives_virtual_local_steps(name: str, outer: str) -> None:
    params, others = make_params(SHAPES), make_params(SHAPES)
    method = enter(f"{name}-every-{EVERY}{outer}", params)
    take_steps(method, params, [LR] * STEPS)
    momentum = {} if outer else {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
    cluster = VirtualLocalSteps(
        others.items(),
        lambda own: torch.optim.AdamW(own, LR, (0.9, 0.999), weight_decay=DECAY),
        workers=WORKERS,
        every=EVERY,
        aggregation=matrix.DELTA_RULES[name],
        seed=3,
        **momentum,
    )
    train_virtually(cluster, others.values(), 0, STEPS)
    cluster.vote()  # a run ends in one
    assert are_equal(params.values(), others.values())
    assert method.sent_bytes == cluster.traffic.sent_bytes
    n = sum(param.numel() for param in params.values())
    bits = matrix.DELTA_RULES[name].vote_planes * (n + 3 * 32) / n
    assert method.up_bits_per_parameter == pytest.approx(bits * 3 / STEPS)
    assert method.rounds > 0


def test_all_workers_take_the_rate_of_the_schedule() -> None:
    params, others = make_params(SHAPES), make_params(SHAPES)
    method = enter("scaled-every-4-plain", params, steps=4)
    take_steps(method, params, [LR, 0.0, 0.0, 0.0])
    stopped = enter("scaled-every-1-plain", others, steps=1)
    take_steps(stopped, others, [LR])
    assert are_equal(params.values(), others.values())


def test_a_name_says_rule_and_period() -> None:
    method = find_method("residual-2-every-8-plain")
    assert method.kind is MethodKind.OURS
    assert "ResidualVote(bits=2) of deltas of 8 steps of AdamW" in method.definition


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("local-8-scaled-plain", "scaled-every-8-plain"),
        ("local-8-residual-2-nesterov", "residual-2-every-8"),
    ],
)
def test_two_names_of_a_method_mean_the_same(name: str, same: str) -> None:
    assert find_method(name).definition == find_method(same).definition


@pytest.mark.parametrize(
    "name",
    [
        "local-8-majority-plain",  # says no size
        "local-8-scaled-lion",
        "local-0-scaled-plain",
        "local-8-scaled",
        "local-8-majority-lion",
        "sparse-0",
    ],
)
def test_a_name_that_does_not_go_together_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is unknown"):
        find_method(name)


def test_a_name_is_read_for_real_workers() -> None:
    votes = read_local_votes("local-16-estimate-1-nesterov")
    assert votes is not None
    assert (votes.every, votes.rule) == (16, EstimateVote(bits=1))
    assert votes.outer.options == {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
    assert read_local_votes("diloco-8") is None
