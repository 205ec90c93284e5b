"""Orthogonalized directions beside other options: real and virtual workers, and the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distlion
import oracle
from cluster import run_workers
from replay import Outcome, assert_equal_to_the_bit
from tiers import in_tiers

pytestmark = pytest.mark.distributed

ROWS, COLUMNS, N_PLAIN = 12, (5, 12, 40), 33
SIZES = (*(ROWS * n for n in COLUMNS), N_PLAIN)
WORKERS, STEPS, SPOILED_STEP, SPOILED_RANK = 3, 6, 2, 1
FROZEN = 1
HYPER = {"lr": 3e-3, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "averaged momenta": {"momentum_sync": distlion.MomentumSync(every=1)},
    "abstains": {"nonfinite": "abstain"},
    "abstains for its momentum": {"nonfinite": "abstain"},
    "skips": {"nonfinite": "skip"},
    "overflow of a scaler": {},
    "frozen": {},
}
SKIPPED = {"skips": {SPOILED_STEP}, "overflow of a scaler": {SPOILED_STEP}}
"""Steps that nobody does."""


def make_groups(name: str) -> list[dict[str, Any]]:
    values = [torch.from_numpy(oracle.values(0, 99, i, n=n)) for i, n in enumerate(SIZES)]
    matrices = [nn.Parameter(value.view(ROWS, -1)) for value in values[:-1]]
    if name == "frozen":
        matrices[FROZEN].requires_grad_(False)
    return [
        {"params": matrices, "orthogonalize": True},
        {"params": [nn.Parameter(values[-1])], "cautious": True},
    ]


def draw_grads(name: str, step: int, rank: int) -> list[oracle.F32 | None]:
    """Draw a worker's gradients; one has a bad element, another is missing now and then."""
    grads: list[oracle.F32 | None] = [
        oracle.gradient(7, step, rank, index, n) for index, n in enumerate(SIZES)
    ]
    if (step, rank) == (SPOILED_STEP, SPOILED_RANK) and name in ("abstains", *SKIPPED):
        assert grads[0] is not None
        grads[0][17] = np.inf
    if (step + rank) % 4 == 0:
        grads[2] = None
    if name == "frozen":
        grads[FROZEN] = None
    return grads


def set_grads(params: list[Tensor], name: str, step: int, rank: int) -> None:
    for param, grad in zip(params, draw_grads(name, step, rank), strict=True):
        param.grad = None if grad is None else torch.from_numpy(grad).view(param.shape)


def list_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(rank: int, world_size: int) -> dict[str, tuple[Outcome, int]]:
    """Train each case; the state at the end, and the number of committed steps."""
    found = {}
    for name, options in CASES.items():
        optimizer = distlion.DistributedLion(
            make_groups(name), exchange=distlion.AllReduce(), **HYPER, **options
        )
        params = list_params(optimizer)
        if name == "abstains for its momentum" and rank == SPOILED_RANK:
            optimizer.state[params[0]]["exp_avg"][0, 3] = float("nan")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.zeros(()))  # a scale is made when it is first used
        for step in range(STEPS):
            set_grads(params, name, step, rank)
            if name == "overflow of a scaler":
                for param in params:
                    if param.grad is not None:
                        param.grad *= scaler.get_scale()  # a power of two: exact
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        momenta = [optimizer.state[p]["exp_avg"].reshape(-1) for p in params if p.requires_grad]
        outcome = Outcome(flatten(params), [each.numpy().copy() for each in momenta])
        found[name] = (outcome, optimizer.committed_step)
    return found


def flatten(params: list[Tensor]) -> list[np.ndarray]:
    return [param.detach().reshape(-1).numpy().copy() for param in params]


def play_oracle(name: str) -> list[Outcome]:
    values = [oracle.values(0, 99, i, n=n) for i, n in enumerate(SIZES)]
    frozen = values.pop(FROZEN) if name == "frozen" else None
    majority = oracle.Rule("majority")
    groups = [
        oracle.Group(values[:-1], majority, 3e-3, weight_decay=0.1, rows=ROWS),
        oracle.Group(values[-1:], majority, 3e-3, weight_decay=0.1, cautious=True),
    ]
    cluster = oracle.OracleCluster(groups, WORKERS, nonfinite="abstain")
    momenta = cluster.exp_avgs
    if name == "abstains for its momentum":
        momenta[SPOILED_RANK][0][3] = np.nan
    for step in range(STEPS):
        if step in SKIPPED.get(name, ()):
            continue
        grads = [draw_grads(name, step, rank) for rank in range(WORKERS)]
        if frozen is not None:
            grads = [mine[:FROZEN] + mine[FROZEN + 1 :] for mine in grads]
        cluster.step(grads)
        if name == "averaged momenta":
            for index in range(len(SIZES)):
                total = momenta[0][index] + momenta[1][index] + momenta[2][index]
                for mine in momenta:
                    mine[index] = total / np.float32(WORKERS)
    params = cluster.params
    if frozen is not None:  # it takes no coins, and has no momentum
        params.insert(FROZEN, frozen)
    return [Outcome(params, mine) for mine in momenta]


@pytest.fixture(scope="module")
def real() -> list[dict[str, tuple[Outcome, int]]]:
    return run_workers(train, WORKERS, timeout_s=120)


@pytest.mark.parametrize("name", in_tiers(CASES, lambda name: list(CASES).index(name) % 3 == 0))
def test_real_workers_have_the_bits_of_a_plain_loop(real: list[Any], name: str) -> None:
    for rank, expected in enumerate(play_oracle(name)):
        found, n_committed = real[rank][name]
        assert n_committed == STEPS - len(SKIPPED.get(name, ()))
        assert_equal_to_the_bit(found, expected, f"{name}, rank {rank}")


@pytest.mark.parametrize("name", [name for name in CASES if name != "overflow of a scaler"])
def test_virtual_workers_have_the_bits_of_a_plain_loop(name: str) -> None:
    cluster = distlion.VirtualCluster(make_groups(name), workers=WORKERS, **HYPER, **CASES[name])
    params = list_params(cluster)
    if name == "abstains for its momentum":
        cluster.exp_avg(SPOILED_RANK)[0][0, 3] = float("nan")
    for step in range(STEPS):
        for worker in range(WORKERS):
            set_grads(params, name, step, worker)
            cluster.collect(worker)
        cluster.step()
    for worker, expected in enumerate(play_oracle(name)):
        momenta = [each.reshape(-1).numpy() for each in cluster.exp_avg(worker)]
        assert_equal_to_the_bit(Outcome(flatten(params), momenta), expected, f"worker {worker}")


def spoil_momentum(optimizer: Any) -> tuple[list[Tensor], list[np.ndarray]]:
    """Put a NaN into the momentum of a matrix; return parameters, and their values."""
    params = list_params(optimizer)
    set_grads(params, "alone", 1, 0)
    optimizer.state[params[0]]["exp_avg"][0, 3] = float("nan")
    return params, flatten(params)


def test_a_single_worker_leaves_everything_where_a_direction_is_not_finite() -> None:
    optimizer = distlion.DistributedLion(make_groups("alone"), **HYPER)
    params, before = spoil_momentum(optimizer)
    with pytest.raises(distlion.errors.NonFiniteError, match="parameter 0"):
        optimizer.step()
    assert all(map(np.array_equal, flatten(params), before))


def test_under_lion_a_matrix_with_a_nan_in_its_momentum_decays_only() -> None:
    optimizer = distlion.Lion(make_groups("alone"), **HYPER)
    params, before = spoil_momentum(optimizer)
    optimizer.step()
    spoiled, *others = flatten(params)
    decay = np.float32(1 - HYPER["lr"] * HYPER["weight_decay"])
    assert np.array_equal(spoiled, decay * before[0])
    assert not any(
        np.array_equal(x, decay * was) for x, was in zip(others, before[1:], strict=True)
    )
