"""Momenta averaged over real processes: whatever carries them, and whatever goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import drawn
import matrix
from accident import Accident, assert_died, assert_survivors_stopped, stage_all
from cluster import run_workers
from distlion import AllReduce, MomentumSync, Nodes, errors, faults
from drawn import draw_grads
from failures import Caught, assert_all_raised, caught

pytestmark = pytest.mark.distributed

SIZES = {"p0": 4500, "p1": 63, "p2": 1, "p3": 9001}
STEPS = 24

Result = tuple[list[Tensor], list[Tensor]]


def make_params() -> list[tuple[str, nn.Parameter]]:
    return list(drawn.make_params(SIZES).items())


def do_step(optimizer: distlion.DistributedLion, voter: int) -> None:
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = None
    grads = draw_grads(params, voter, optimizer.committed_step)
    # A backward pass, so that hooks of overlap fire.
    sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
    optimizer.step()


def snapshot(optimizer: distlion.DistributedLion) -> Result:
    params = optimizer.param_groups[0]["params"]
    return [p.detach().clone() for p in params], [optimizer.state[p]["exp_avg"] for p in params]


def train(rank: int, world_size: int, variants: dict[str, dict[str, Any]]) -> dict[str, Result]:
    results = {}
    for name, arguments in variants.items():
        optimizer = distlion.DistributedLion(make_params(), lr=1e-2, **arguments)
        for _ in range(STEPS):
            planned = optimizer.plan
            do_step(optimizer, rank)
            assert optimizer.traffic.last_sent_bytes == planned.sent_bytes
        results[name] = snapshot(optimizer)
    return results


def assert_equal(left: Result, right: Result) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_patterns_and_overlap_give_the_same_bits(world_size: int) -> None:
    sync = MomentumSync(every=4)
    variants: dict[str, dict[str, Any]] = {
        **{name: {"exchange": pattern} for name, pattern in matrix.PATTERNS_OF_ALL_RULES.items()},
        "diagnosed": {"exchange": AllReduce(), "agreement": distlion.Agreement(every=5)},
        "auto": {"exchange": "auto"},
        "overlap": {"exchange": AllReduce(), "overlap": True, "bucket_elements": 4600},
    }

    for results in run_workers(
        train, world_size, {name: {**v, "momentum_sync": sync} for name, v in variants.items()}
    ):
        for name in variants:
            assert_equal(results[name], results["all-reduce"])


def train_in_nodes(rank: int, world_size: int, size: int, sync: MomentumSync) -> Result:
    optimizer = distlion.DistributedLion(
        make_params(),
        lr=1e-2,
        momentum_sync=sync,
        nodes=Nodes(ranks_per_node=size),
        exchange=AllReduce(),
    )
    for _ in range(STEPS):
        planned = optimizer.plan
        do_step(optimizer, rank // size)  # ranks of a node have equal gradients, and so equal means
        assert optimizer.traffic.last_sent_bytes == planned.sent_bytes
    return snapshot(optimizer)


@pytest.mark.slow
def test_nodes_have_the_momenta_of_single_workers() -> None:
    sync = MomentumSync(every=3)
    alone = run_workers(train, 2, {"alone": {"momentum_sync": sync, "exchange": AllReduce()}})

    in_nodes = run_workers(train_in_nodes, 4, 2, sync)

    params, momenta = alone[0]["alone"]
    for node_params, _ in in_nodes:
        assert all(map(torch.equal, node_params, params))
    for first in (0, 2):
        parts = [in_nodes[first + local][1] for local in range(2)]
        for momentum, *pieces in zip(momenta, *parts, strict=True):
            # Which rank has the first piece alternates; both are there.
            joined = [torch.cat(order) for order in (pieces, pieces[::-1])]
            assert any(torch.equal(whole, momentum) for whole in joined)


def keep_mean(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Train once with and once without, on votes that no momentum changes."""
    momenta = []
    for sync in (None, MomentumSync(every=3)):
        params = make_params()
        optimizer = distlion.DistributedLion(params, lr=0.0, momentum_sync=sync)
        for _ in range(STEPS):
            do_step(optimizer, rank)
        momenta.append([optimizer.state[param]["exp_avg"] for _, param in params])
    return momenta[0], momenta[1]


@pytest.mark.slow
def test_mean_momentum_is_the_same_with_and_without() -> None:
    results = run_workers(keep_mean, 3)

    for index in range(len(SIZES)):
        without = torch.stack([local[index] for local, _ in results]).double()
        averaged = torch.stack([local[index] for _, local in results]).double()
        # Momenta are below 1; each of 18 steps and 6 averages rounds a few times.
        assert (without.mean(0) - averaged.mean(0)).abs().max() < 100 * 2.0**-24
        assert averaged.var(0).mean() < 0.5 * without.var(0).mean()


ACCIDENTS = {
    f"{point}-{firing}": Accident(
        point,
        firing=firing,
        options={"exchange": AllReduce(), "momentum_sync": MomentumSync(every=1)},
    )
    # Votes are framed and counted first, momenta after them.
    for point, firing in (("framed", 3), ("framed", 4), ("counted", 2), ("before_commit", 1))
}


@pytest.fixture(scope="module")
def accidents() -> dict[str, list[Any]]:
    return stage_all(ACCIDENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCIDENTS)
def test_kill_while_momenta_travel_leaves_no_step_half_done(
    accidents: dict[str, list[Any]], name: str
) -> None:
    outcomes = accidents[name]
    assert_died(outcomes[1])
    assert_survivors_stopped(ACCIDENTS[name], outcomes, errors.PeerLostError)


def corrupt_momenta(rank: int, world_size: int) -> Caught | None:
    optimizer = distlion.DistributedLion(
        make_params(),
        lr=1e-2,
        exchange=AllReduce(),
        momentum_sync=MomentumSync(every=1),
    )
    do_step(optimizer, rank)
    framed = 0

    def flip(chunks: object) -> None:
        nonlocal framed
        framed += 1
        if framed == 3:  # votes, replies, then momenta
            assert isinstance(chunks, Tensor)
            chunks[(rank + 1) % world_size, 200] ^= 1

    fault = faults.arm(rank=1, step=1, point="framed", action=flip)
    error = caught(optimizer, lambda: do_step(optimizer, rank))
    assert fault.fired == (4 if rank == 1 else 0)
    return error


def test_momenta_damaged_on_the_way_are_an_error_on_all_and_nothing_moves() -> None:
    assert_all_raised(run_workers(corrupt_momenta, 3), errors.CorruptFrameError, "rank 1")


def corrupt_sample(rank: int, world_size: int, arguments: dict[str, Any]) -> Caught | None:
    """Damage the sample of rank 1 in the 16th step, which is diagnosed."""
    optimizer = distlion.DistributedLion(make_params(), lr=1e-2, exchange=AllReduce(), **arguments)
    for _ in range(15):
        do_step(optimizer, rank)
    framed = 0

    def flip(chunk: object) -> None:
        nonlocal framed
        framed += 1
        if framed == 3:  # votes, replies, then the sample
            assert isinstance(chunk, Tensor)
            chunk[200] ^= 1

    fault = faults.arm(rank=1, step=15, point="framed", action=flip)
    error = caught(optimizer, lambda: do_step(optimizer, rank))
    assert fault.fired >= 4 if rank == 1 else fault.fired == 0
    return error


@pytest.mark.parametrize(
    "arguments",
    [
        {"agreement": distlion.Agreement(every=5)},
        pytest.param(
            {"agreement": distlion.Agreement(every=5), "nodes": Nodes(ranks_per_node=2)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_damaged_sample_is_an_error_on_all_and_nothing_moves(arguments: dict[str, Any]) -> None:
    found = run_workers(corrupt_sample, 4, arguments)
    assert_all_raised(found, errors.CorruptFrameError, "rank 1")


def different_functions(rank: int, world_size: int) -> Caught | None:
    select = (lambda name, param: name != "p1") if rank else (lambda name, param: True)
    sync = MomentumSync(every=1, select=select)
    return caught(None, lambda: distlion.DistributedLion(make_params(), momentum_sync=sync))


def test_functions_that_select_differently_are_found_at_construction() -> None:
    found = run_workers(different_functions, 2)
    assert_all_raised(found, errors.ConfigMismatchError, "momenta averaged")
