"""Momenta averaged over real processes: whatever carries them, and whatever goes wrong."""

from __future__ import annotations

import pickle
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
from tiers import in_tiers

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


@pytest.mark.parametrize("world_size", in_tiers([2, 3], lambda n: n == 3))
@pytest.mark.parametrize("select", ["all", "auto"])
def test_patterns_and_overlap_give_the_same_bits(world_size: int, select: str) -> None:
    sync = MomentumSync(every=4, select=select)
    variants: dict[str, dict[str, Any]] = {
        **{name: {"exchange": pattern} for name, pattern in matrix.PATTERNS_OF_ALL_RULES.items()},
        "diagnosed": {"exchange": AllReduce(), "diagnose_every": 5},
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


@pytest.mark.parametrize("stagger", in_tiers([True, False], bool))
def test_nodes_have_the_momenta_of_single_workers_once_all_are_averaged(stagger: bool) -> None:
    """The parts of a rank have turns of their own, so that only every step is comparable."""
    sync = MomentumSync(every=1, stagger=stagger)
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


def test_mean_momentum_is_the_same_with_and_without() -> None:
    results = run_workers(keep_mean, 3)

    for index in range(len(SIZES)):
        without = torch.stack([local[index] for local, _ in results]).double()
        averaged = torch.stack([local[index] for _, local in results]).double()
        # Momenta are below 1; each of 18 steps and 6 averages rounds a few times.
        assert (without.mean(0) - averaged.mean(0)).abs().max() < 100 * 2.0**-24
        assert averaged.var(0).mean() < 0.5 * without.var(0).mean()


def resume(rank: int, world_size: int, at: int) -> tuple[Result, Result, list[int]]:
    arguments: dict[str, Any] = {
        "lr": 1e-2,
        "momentum_sync": MomentumSync(every=3, select="auto", share=0.3),
    }
    whole = distlion.DistributedLion(make_params(), **arguments)
    for _ in range(at):
        do_step(whole, rank)
    state = pickle.loads(pickle.dumps(whole.state_dict()))
    weights = [param.detach().clone() for param in whole.param_groups[0]["params"]]
    resumed = distlion.DistributedLion(make_params(), **arguments)
    for param, weight in zip(resumed.param_groups[0]["params"], weights, strict=True):
        param.data.copy_(weight)
    resumed.load_state_dict(state)
    for _ in range(12):
        do_step(whole, rank)
        do_step(resumed, rank)
    return snapshot(whole), snapshot(resumed), whole.param_groups[0]["momentum_selected"]


@pytest.mark.parametrize("at", [10, 17])
def test_resumed_run_goes_on_averaging_what_was_selected(at: int) -> None:
    results = run_workers(resume, 3, at)

    for whole, resumed, selected in results:
        assert_equal(whole, resumed)
        assert selected == results[0][2]
        assert 0 < sum(selected) < len(SIZES)


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
    """Damage what rank 1 says of its sample in the 16th step, the first at which "auto" looks."""
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
        {"diagnose_every": 5},
        {"momentum_sync": MomentumSync(every=100, select="auto"), "nodes": Nodes(ranks_per_node=2)},
        pytest.param(
            {"momentum_sync": MomentumSync(every=100, select="auto", stagger=False)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"diagnose_every": 5, "nodes": Nodes(ranks_per_node=2)}, marks=pytest.mark.slow
        ),
    ],
)
def test_damaged_sample_is_an_error_on_all_and_nothing_moves(arguments: dict[str, Any]) -> None:
    found = run_workers(corrupt_sample, 4, arguments)
    assert_all_raised(found, errors.CorruptFrameError, "rank 1")


def test_selections_that_differ_are_found_when_they_are_loaded() -> None:
    assert_all_raised(run_workers(load_differently, 2), errors.ConfigMismatchError, "selected")


def load_differently(rank: int, world_size: int) -> Caught | None:
    optimizer = distlion.DistributedLion(
        make_params(), momentum_sync=MomentumSync(every=3, select="auto")
    )
    state = optimizer.state_dict()
    state["param_groups"][0]["momentum_selected"] = [1, 1, 1, rank]
    return caught(optimizer, lambda: optimizer.load_state_dict(state))


def different_functions(rank: int, world_size: int) -> Caught | None:
    select = (lambda name, param: name != "p1") if rank else (lambda name, param: True)
    sync = MomentumSync(every=1, select=select)
    return caught(None, lambda: distlion.DistributedLion(make_params(), momentum_sync=sync))


def test_functions_that_select_differently_are_found_at_construction() -> None:
    found = run_workers(different_functions, 2)
    assert_all_raised(found, errors.ConfigMismatchError, "momenta averaged")
