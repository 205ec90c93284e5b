"""The parameter that an error names is the one that is wrong, wherever it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distlion
from cluster import run_workers
from distlion import errors, faults
from failures import Caught, assert_all_raised, caught, params_of

pytestmark = pytest.mark.distributed

N_ELEMENTS = 4200  # of each parameter: with nodes, each rank has a piece
NAMES = ["a", "b", "c", "d", "e"]
WRONG_RANK = 1
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one bucket": (2, {}),
    "a bucket each": (2, {"bucket_elements": 1}),
    "nodes": (4, {"nodes": distlion.Nodes(ranks_per_node=2)}),
}


def make_infinite(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad[7] = torch.inf


def make_sparse(param: nn.Parameter) -> None:
    param.grad = torch.zeros(N_ELEMENTS).to_sparse()


def change(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


ERRORS = {
    "infinite": (make_infinite, "before_step", errors.NonFiniteError),
    "sparse": (make_sparse, "before_step", errors.SparseGradientError),
    "changed": (change, "after_encode", errors.GradientChangedError),
}


def step_with_each(
    rank: int, world_size: int, options: dict[str, Any]
) -> dict[tuple[str, int], Caught | None]:
    """Step with each parameter wrong in each way; after such errors training may go on."""
    params = [(name, nn.Parameter(torch.zeros(N_ELEMENTS))) for name in NAMES]
    optimizer = distlion.DistributedLion(
        params,
        lr=1e-3,
        exchange=distlion.AllReduce(),
        timeouts=distlion.Timeouts(step_s=20),
        **options,
    )
    raised = {}
    for how, (action, point, _) in ERRORS.items():
        for wrong, param in enumerate(params_of(optimizer)):
            for each in params_of(optimizer):
                each.grad = torch.ones(N_ELEMENTS)
            fault = faults.arm(
                rank=WRONG_RANK,
                step=0,
                point=point,  # type: ignore[arg-type]
                action=lambda _, action=action, param=param: action(param),
            )
            raised[how, wrong] = caught(optimizer, optimizer.step)
            assert (fault.fired > 0) is (rank == WRONG_RANK)
            faults.disarm_all()
    return raised


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parameter_named_is_the_one_that_is_wrong(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    outcomes = run_workers(step_with_each, world_size, options)
    for how, (_, _, error) in ERRORS.items():
        for wrong, name in enumerate(NAMES):
            raised = [outcome[how, wrong] for outcome in outcomes]
            # Inside a node, what is not finite shows in the mean, at the rank that has its piece.
            who = "rank [01]" if layout == "nodes" else f"rank {WRONG_RANK}"
            assert_all_raised(raised, error, f" {name} ", who)
