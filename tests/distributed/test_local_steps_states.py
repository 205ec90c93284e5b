"""States of workers with local steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from drawn import make_params
from failures import Caught, assert_raised
from local_runs import (
    EVERY,
    SHAPES,
    STEPS,
    are_equal,
    make,
    train,
)

pytestmark = pytest.mark.distributed

N_WORKERS = 3
Options = dict[str, Any]


def save_and_resume(rank: int, world_size: int, folder: str, options: Options) -> bool:
    """Stop inside of a period, and go on in a new optimizer."""
    params = make_params(SHAPES)
    optimizer = make(params, **options)
    train(optimizer, params.values(), rank, 0, EVERY + 1)
    torch.save((optimizer.state_dict(), [*params.values()]), Path(folder) / str(rank))
    train(optimizer, params.values(), rank, EVERY + 1, STEPS)

    resumed_params = make_params(SHAPES)
    resumed = make(resumed_params, **options)
    state, weights = torch.load(Path(folder) / str(rank), weights_only=True)
    with torch.no_grad():
        for param, weight in zip(resumed_params.values(), weights, strict=True):
            param.copy_(weight)
    resumed.load_state_dict(state)
    train(resumed, resumed_params.values(), rank, EVERY + 1, STEPS)
    return are_equal(params.values(), resumed_params.values()) and are_equal(
        optimizer.common_point, resumed.common_point
    )


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": distlion.ResidualVote(2), "outer_momentum": 0.9, "outer_lr": 0.5},
        {"aggregation": distlion.EstimateVote()},
    ],
)
def test_a_state_goes_on_to_the_same_bits(tmp_path: Path, options: Options) -> None:
    assert all(run_workers(save_and_resume, N_WORKERS, str(tmp_path), options))


def load_another(rank: int, world_size: int) -> tuple[Caught | None, bool]:
    """Rank 1 has a state that does not fit; nobody loads."""
    params = make_params(SHAPES)
    optimizer = make(params)
    train(optimizer, params.values(), rank, 0, 1)
    state = optimizer.state_dict()
    if rank == 1:
        state["local_steps"] = {**state["local_steps"], "every": 7}
    kept, found = optimizer.state, None
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        found = Caught(type(error).__name__, str(error), None, None, (), None, True)
    train(optimizer, params.values(), rank, 1, EVERY)
    optimizer.verify_replicas()
    return found, optimizer.state is kept


def test_a_state_that_does_not_fit_on_one_worker_is_loaded_on_none() -> None:
    for found, is_kept in run_workers(load_another, 2):
        assert_raised(found, distlion.errors.CheckpointError, "votes every 7 steps")
        assert is_kept
