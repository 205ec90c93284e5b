"""What votes with error feedback have said survives all that a run meets: bits as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from cluster import run_workers
from distlion import errors, faults
from distlion.virtual import VirtualCluster
from distlion.wire import Exchange
from distlion_netlab.rehearsal import is_trying_overlap, rehearse_step
from drawn import draw_grads, make_params, set_grads
from failures import caught, make_optimizer, params_of
from tiers import in_tiers

pytestmark = pytest.mark.distributed

N_WORKERS, STEPS, AT = 3, 8, 4
SHAPES = {"p0": (70, 33), "p1": (5,), "p2": (4200,)}
RULE = distlion.FeedbackVote()
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "aggregation": RULE}
PATTERNS = pytest.mark.parametrize(
    "pattern", matrix.PATTERNS_OF_ALL_RULES.values(), ids=matrix.PATTERNS_OF_ALL_RULES
)
A_PATTERN = pytest.mark.parametrize(
    "pattern",
    in_tiers(
        matrix.PATTERNS_OF_ALL_RULES.values(), lambda each: isinstance(each, distlion.AllReduce)
    ),
    ids=matrix.PATTERNS_OF_ALL_RULES,
)


def train(optimizer: Any, params: dict[str, nn.Parameter], rank: int, begin: int, end: int) -> None:
    for step in range(begin, end):
        set_grads(params.values(), rank, step)
        optimizer.step()


def make(params: dict[str, nn.Parameter], pattern: Exchange) -> distlion.DistributedLion:
    return distlion.DistributedLion(
        params.items(), exchange=pattern, timeouts=distlion.Timeouts(step_s=20), **HYPER
    )


def train_virtually(*, more_at: int | None = None) -> list[Tensor]:
    """Train all workers in one process; ``more_at``: the step before which a group is added."""
    params = make_params(SHAPES)
    cluster = VirtualCluster(params.items(), workers=N_WORKERS, **HYPER)
    for step in range(STEPS):
        if step == more_at:
            params["more"] = make_more()
            cluster.add_param_group({"params": [("more", params["more"])]})
        for worker in range(N_WORKERS):
            set_grads(params.values(), worker, step)
            cluster.collect(worker)
        cluster.step()
    return [param.detach() for param in params.values()]


def make_more() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 130))


def load(rank: int, world_size: int, pattern: Exchange) -> tuple[list[Tensor], int, int, int]:
    """Save a state, go on a while, and go on from the state instead."""
    params = make_params(SHAPES)
    optimizer = make(params, pattern)
    train(optimizer, params, rank, 0, AT)
    state = optimizer.state_dict()
    state["state"] = {
        key: {name: kept.clone() for name, kept in entry.items()}
        for key, entry in state["state"].items()
    }
    weights = [param.detach().clone() for param in params.values()]
    train(optimizer, params, rank, AT, STEPS)
    assert optimizer.traffic.rule_state_sent_bytes == 0
    with torch.no_grad():
        for param, weight in zip(params.values(), weights, strict=True):
            param.copy_(weight)
    before = optimizer.traffic.sent_bytes
    optimizer.load_state_dict(state)
    train(optimizer, params, rank, AT, STEPS)
    traffic = optimizer.traffic
    assert traffic.last_sent_bytes == optimizer.plan.sent_bytes
    sent = traffic.sent_bytes - before
    values = [param.detach() for param in params.values()]
    return values, traffic.rule_state_sent_bytes, sent, optimizer.plan.sent_bytes


@PATTERNS
def test_a_state_that_is_loaded_goes_on_with_its_own_bits(pattern: Exchange) -> None:
    expected = train_virtually()
    for rank, (values, estimates, sent, planned) in enumerate(
        run_workers(load, N_WORKERS, pattern)
    ):
        assert all(map(torch.equal, values, expected))
        assert sent == (STEPS - AT) * planned
        if rank or not isinstance(pattern, distlion.ParameterServer):
            # Two thirds of them, at least, in 32 bits.
            assert estimates > 2 / 3 * 4 * sum(param.numel() for param in values)


def begin_anew(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as of no step yet, which still holds what was said."""
    return {**state, "param_groups": [{**group, "step": 0} for group in state["param_groups"]]}


def load_at_the_start(rank: int, world_size: int, pattern: Exchange) -> list[Tensor]:
    params = make_params(SHAPES)
    optimizer = make(params, pattern)
    train(optimizer, params, rank, 0, AT)
    optimizer.load_state_dict(begin_anew(optimizer.state_dict()))
    assert optimizer.committed_step == 0
    train(optimizer, params, rank, AT, STEPS)
    return [param.detach() for param in params.values()]


@A_PATTERN
def test_a_state_of_no_step_may_hold_estimates(pattern: Exchange) -> None:
    params = make_params(SHAPES)
    cluster = VirtualCluster(params.items(), workers=N_WORKERS, **HYPER)
    for step in range(STEPS):
        if step == AT:
            cluster.load_state_dict(begin_anew(cluster.state_dict()))
        for worker in range(N_WORKERS):
            set_grads(params.values(), worker, step)
            cluster.collect(worker)
        cluster.step()
    expected = [param.detach() for param in params.values()]
    for values in run_workers(load_at_the_start, N_WORKERS, pattern):
        assert all(map(torch.equal, values, expected))


def damage(rank: int, world_size: int) -> tuple[str, int, bool, int]:
    """Estimates are damaged on their way, when a state of another step is loaded."""
    params = make_params(SHAPES)
    optimizer = make(params, distlion.AllReduce())
    train(optimizer, params, rank, 0, AT)
    state = optimizer.state_dict()
    later = {**state, "param_groups": [{**group, "step": 40} for group in state["param_groups"]]}
    later["state"] = {
        key: {name: kept + 1 for name, kept in entry.items()}
        for key, entry in state["state"].items()
    }
    before = [kept.clone() for entry in optimizer.state.values() for kept in entry.values()]

    def flip(chunks: Tensor) -> None:
        if chunks.ndim == 2 and chunks.shape[1] > 4096:  # float32, and not votes of the same step
            chunks[-1, -1] ^= 1

    fault = faults.arm(rank=1, step=40, point="framed", action=flip)
    try:
        optimizer.load_state_dict(later)
    except errors.DistlionError as error:
        kind = type(error).__name__
    after = [kept for entry in optimizer.state.values() for kept in entry.values()]
    return kind, optimizer.committed_step, all(map(torch.equal, before, after)), fault.fired


def test_a_load_whose_estimates_are_damaged_changes_nothing() -> None:
    outcomes = run_workers(damage, N_WORKERS)
    assert outcomes[1][3] >= 1, "the fault did not fire"
    for kind, step, unchanged, _ in outcomes:
        assert (kind, step, unchanged) == ("CorruptFrameError", AT, True)


def try_overlap(rank: int, world_size: int) -> tuple[list[Tensor], bool]:
    """Take turns between overlap and none, each of which lays out anew."""
    params = make_params(SHAPES)
    optimizer = distlion.DistributedLion(
        params.items(), exchange=distlion.AllReduce(), overlap="auto", **HYPER
    )
    for step in range(70):
        optimizer.zero_grad()
        grads = draw_grads(params.values(), rank, step)
        sum((p * g).sum() for p, g in zip(params.values(), grads, strict=True)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [param.detach() for param in params.values()], is_trying_overlap(optimizer)


@pytest.mark.slow
def test_the_trial_of_overlap_moves_no_estimate() -> None:
    params = make_params(SHAPES)
    cluster = VirtualCluster(params.items(), workers=N_WORKERS, **HYPER)
    for step in range(70):
        for worker in range(N_WORKERS):
            set_grads(params.values(), worker, step)
            cluster.collect(worker)
        cluster.step()
    expected = [param.detach() for param in params.values()]
    for values, is_trying in run_workers(try_overlap, N_WORKERS):
        assert not is_trying
        assert all(map(torch.equal, values, expected))


def repair(rank: int, world_size: int) -> int:
    """A worker's copy of what others said is damaged, so that its replica leaves the others."""
    params = make_params(SHAPES)
    optimizer = distlion.DistributedLion(
        params.items(),
        exchange=distlion.AllGather(),
        replicas=distlion.Replicas(check_every=2, on_mismatch="repair"),
        **HYPER,
    )
    train(optimizer, params, rank, 0, AT)
    if rank == 1:
        (bucket,) = optimizer._session.routing.buckets
        bucket.parts[0].vote._everybody[0] += 100  # type: ignore[attr-defined]
    train(optimizer, params, rank, AT, AT + 2)
    repaired = optimizer.traffic.check_sent_bytes
    train(optimizer, params, rank, AT + 2, STEPS)
    optimizer.verify_replicas()
    (bucket,) = optimizer._session.routing.buckets
    assert float(bucket.parts[0].vote._everybody.abs().max()) < 100  # type: ignore[attr-defined]
    return repaired


def test_replicas_that_are_repaired_get_what_was_said_anew() -> None:
    assert all(run_workers(repair, N_WORKERS))


def fail(rank: int, world_size: int, pattern: Exchange) -> tuple[list[Tensor], str]:
    """In the middle of a run a step is rehearsed, and one is refused: a gradient is not finite."""
    params = make_params(SHAPES)
    optimizer = make(params, pattern)
    train(optimizer, params, rank, 0, AT)
    set_grads(params.values(), rank, 100)
    rehearse_step(optimizer)
    if rank == 1:
        params["p2"].grad[7] = torch.nan  # type: ignore[index]
    found = caught(optimizer, optimizer.step)
    assert found is not None
    train(optimizer, params, rank, AT, STEPS)
    return [param.detach() for param in params.values()], found.kind


@A_PATTERN
def test_a_step_that_is_not_committed_has_said_nothing(pattern: Exchange) -> None:
    expected = train_virtually()
    for values, kind in run_workers(fail, N_WORKERS, pattern):
        assert kind == "NonFiniteError"
        assert all(map(torch.equal, values, expected))


def add(rank: int, world_size: int) -> list[Tensor]:
    params = make_params(SHAPES)
    optimizer = make(params, distlion.AllReduce())
    train(optimizer, params, rank, 0, AT)
    params["more"] = make_more()
    optimizer.add_param_group({"params": [("more", params["more"])]})
    train(optimizer, params, rank, AT, STEPS)
    return [param.detach() for param in params.values()]


def test_parameters_that_are_added_move_no_estimate() -> None:
    expected = train_virtually(more_at=AT)
    for values in run_workers(add, N_WORKERS):
        assert all(map(torch.equal, values, expected))


def train_as_nodes(rank: int, world_size: int) -> list[Tensor]:
    """Parameters of several pieces: what is said of each has scales of its own."""
    params = make_params({"p0": (3, 5000), "p1": (70,)})
    optimizer = distlion.DistributedLion(
        params.items(),
        exchange=distlion.AllReduce(),
        nodes=distlion.Nodes(ranks_per_node=2),
        **HYPER,
    )
    train(optimizer, params, rank, 0, STEPS)
    optimizer.verify_replicas()
    assert {state["estimate"].ndim for state in optimizer.state.values()} == {1}
    kept = sum(int((state["estimate"] != 0).sum()) for state in optimizer.state.values())
    assert kept == sum(state["estimate"].numel() for state in optimizer.state.values())
    return [param.detach() for param in params.values()]


def test_ranks_of_a_node_keep_estimates_of_their_pieces() -> None:
    first, *others = run_workers(train_as_nodes, 4)
    for other in others:
        assert all(map(torch.equal, first, other))


def follow(rank: int, world_size: int) -> float:
    """One of three workers wants more than the two others together, and gets it."""
    param = nn.Parameter(torch.zeros(10))
    optimizer = distlion.DistributedLion([param], exchange=distlion.AllReduce(), **HYPER)
    for _ in range(30):
        param.grad = torch.full_like(param, 3.0 if rank == 0 else -1.0)
        optimizer.step()
    return float(param.max().detach())


def test_one_who_wants_much_outweighs_two_who_want_little() -> None:
    assert all(most < 0 for most in run_workers(follow, 3))


def hold_drafts(rank: int, world_size: int) -> list[bool]:
    """Return whether a bucket holds a draft, or votes, after a step that was committed."""
    optimizer = make_optimizer(aggregation=distlion.FeedbackVote(), exchange=distlion.AllReduce())
    for param in params_of(optimizer):
        param.grad = torch.full_like(param, float(rank + 1))
    optimizer.step()
    kept: list[Any] = [bucket.parts[0].vote for bucket in optimizer._session.routing.buckets]
    return [(each._move_own or each._move_counted) is not None for each in kept]


def test_drafts_and_votes_are_let_go_of_once_they_are_committed() -> None:
    assert run_workers(hold_drafts, 2) == [[False]] * 2
