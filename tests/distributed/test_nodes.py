"""Nodes as workers: to the bit, a vote of single workers that hold the nodes' mean gradients."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import distlion
import distlion.wire
import matrix
import oracle
from cluster import run_workers
from distlion import errors, faults
from distlion.step.nodes import Cutter
from distlion.votes import Aggregation
from failures import Caught, assert_all_raised, caught, params_of
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_equal_to_the_bit,
    make_optimizer,
    run_backward,
    set_grads,
    worker_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

UNIT = 4096
SIZES = (1, 65, 4097, 20000)
# Each in the part of one rank: a piece has scales of its own.
UNCUT_SIZES = (1, 65, 3000, 4096)
# Ranks and ranks of a node: one node, several, of one, two and three ranks.
SHAPES = [(2, 1), (2, 2), (4, 2), (6, 2), (6, 3)]


def case_of(rule: Aggregation, name: str) -> Case:
    sizes = UNCUT_SIZES if rule.worker_state else SIZES
    groups = (
        GroupSpec(rule, sizes, lr=2e-3, weight_decay=0.1),
        GroupSpec(distlion.MajorityVote(), (300, 9001), lr=1e-3, dtype="bfloat16"),
    )
    return Case(name, groups, steps=4, seed=3, absent=True, exchange=distlion.AllReduce())


# Of 70 rows, cut at elements that no row begins with; the last one is in the part of one rank.
MATRICES = GroupSpec(distlion.MajorityVote(), (10500, 4480, 210), lr=2e-3, rows=70)
CASES = {
    **{name: case_of(matrix.RULES[name], name) for name in matrix.first_of_each_class()},
    "matrices": replace(
        case_of(distlion.MajorityVote(), "matrices"),
        groups=(MATRICES, GroupSpec(distlion.MajorityVote(), (9001,), lr=1e-3, cautious=True)),
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"exchange": pattern} for name, pattern in matrix.PATTERNS_OF_ALL_RULES.items()},
    "auto": {"exchange": "auto"},
    "overlap": {"overlap": True, "bucket_elements": 5000},
    "abstain": {"nonfinite": "abstain"},
}
RUNS = [
    *((name, "all-reduce") for name in CASES),
    *(("majority", variant) for variant in VARIANTS),
    *(("matrices", variant) for variant in ("overlap", "abstain")),
]


def node_mean(case: Case, step: int, node: int, size: int) -> list[oracle.F32 | None]:
    """Average a node's gradients as Nodes says: in float32, in local-rank order, missing = 0."""
    ranks = [worker_grads(case, step, node * size + local) for local in range(size)]
    means: list[oracle.F32 | None] = []
    for index, (n, dtype) in enumerate(zip(case.sizes, case.dtypes, strict=True)):
        total = torch.zeros(n)
        present = [grads[index] for grads in ranks if grads[index] is not None]
        for grad in present:
            total += torch.from_numpy(grad)
        mean = (total / size).to(getattr(torch, dtype)).float().numpy()
        means.append(mean if present else None)
    return means


def play_flat(rank: int, world_size: int, size: int) -> dict[str, Outcome]:
    """One worker for each node, fed with its mean gradients."""
    outcomes = {}
    for name, case in CASES.items():
        optimizer = make_optimizer(case, rank=rank)
        for step in range(case.steps):
            set_grads(optimizer, node_mean(case, step, rank, size))
            optimizer.step()
        outcomes[name] = take_snapshot(optimizer)
    return outcomes


def take_snapshot(optimizer: distlion.DistributedLion) -> Outcome:
    params = params_of(optimizer)
    return Outcome(
        [p.detach().float().reshape(-1).numpy().copy() for p in params],
        [optimizer.state[p]["exp_avg"].float().reshape(-1).numpy().copy() for p in params],
    )


def play_nodes(rank: int, world_size: int, size: int) -> dict[str, Outcome]:
    outcomes = {}
    for name, variant in RUNS:
        case, options = CASES[name], VARIANTS[variant]
        optimizer = make_optimizer(
            case, rank=rank, nodes=distlion.Nodes(ranks_per_node=size), **options
        )
        for step in range(case.steps):
            if variant == "overlap":
                optimizer.zero_grad()
                run_backward(optimizer, worker_grads(case, step, rank))
            else:
                set_grads(optimizer, worker_grads(case, step, rank))
            optimizer.step()
        optimizer.verify_replicas()
        outcomes[f"{name}/{variant}"] = take_snapshot(optimizer)
    return outcomes


@functools.cache
def flat_of(n_nodes: int, size: int) -> list[dict[str, Outcome]]:
    return run_workers(play_flat, n_nodes, size, timeout_s=120, measured=False)


@functools.cache
def nodes_of(world_size: int, size: int) -> list[dict[str, Outcome]]:
    return run_workers(
        play_nodes, world_size, size, timeout_s=180, measured=(world_size, size) == (4, 2)
    )


def own_part(case: Case, whole: Outcome, local: int, size: int) -> Outcome:
    cutter = Cutter(size, UNIT)
    cuts = [cutter.cut(n) for n in case.sizes]
    parts = [
        exp_avg[cut[local][0] : cut[local][1]]
        for exp_avg, cut in zip(whole.exp_avgs, cuts, strict=True)
    ]
    return replace(whole, exp_avgs=parts)


@pytest.mark.parametrize(("world_size", "size"), in_tiers(SHAPES, lambda shape: shape == (4, 2)))
@pytest.mark.parametrize(("name", "variant"), RUNS)
def test_nodes_equal_single_workers_with_their_mean_gradients(
    world_size: int, size: int, name: str, variant: str
) -> None:
    expected = flat_of(world_size // size, size)
    for rank, outcomes in enumerate(nodes_of(world_size, size)):
        node, local = divmod(rank, size)
        wanted = expected[node][name]
        if size > 1:
            wanted = own_part(CASES[name], wanted, local, size)
        assert_equal_to_the_bit(outcomes[f"{name}/{variant}"], wanted, f"rank {rank}")


def make_nodes(*, orthogonalize: bool = False, **options: Any) -> distlion.DistributedLion:
    params = [
        {"params": [("small", torch.nn.Parameter(torch.full((70,), 0.5)))]},
        {
            "params": [("large", torch.nn.Parameter(torch.full((3, 5000), 0.5)))],
            "orthogonalize": orthogonalize,
        },
    ]
    settings = {
        "lr": 1e-2,
        "nodes": distlion.Nodes(ranks_per_node=2),
        "timeouts": distlion.Timeouts(step_s=20),
    }
    return distlion.DistributedLion(params, **(settings | options))


def set_some_grads(optimizer: Any, step: int, rank: int) -> None:
    for index, p in enumerate(params_of(optimizer)):
        p.grad = torch.from_numpy(oracle.gradient(9, step, rank, index, p.numel())).view(p.shape)


def break_gradient(
    rank: int, world_size: int, nonfinite: str, options: dict[str, Any]
) -> tuple[Caught | None, int]:
    optimizer = make_nodes(nonfinite=nonfinite, **options)
    found = None
    for step in range(3):
        set_some_grads(optimizer, step, rank)
        if (rank, step) == (1, 1):
            params_of(optimizer)[1].grad[2, 4000] = float("nan")
        outcome = caught(optimizer, optimizer.step)
        found = found or outcome
    optimizer.verify_replicas()
    assert all(torch.isfinite(entry["exp_avg"]).all() for entry in optimizer.state.values())
    return found, optimizer.committed_step


@pytest.mark.parametrize(
    ("nonfinite", "committed", "orthogonalize"),
    in_tiers(
        [
            (*policy, orthogonalize)
            for policy in (("raise", 2), ("skip", 2), ("abstain", 3))
            for orthogonalize in (False, True)
        ],
        lambda case: case[2] == (case[0] == "abstain"),
    ),
)
def test_value_that_is_not_finite_follows_the_policy_on_all_ranks(
    nonfinite: str, committed: int, orthogonalize: bool
) -> None:
    outcomes = run_workers(break_gradient, 4, nonfinite, {"orthogonalize": orthogonalize})
    assert [steps for _, steps in outcomes] == [committed] * 4
    if nonfinite == "raise":
        assert_all_raised([found for found, _ in outcomes], errors.NonFiniteError, "large")
    else:
        assert [found for found, _ in outcomes] == [None] * 4


def differ(rank: int, world_size: int) -> Caught | None:
    optimizer = make_nodes()
    set_some_grads(optimizer, 0, rank)
    if rank == 3:
        optimizer.param_groups[0]["lr"] = 0.5
    return caught(optimizer, optimizer.step)


def test_settings_that_differ_inside_a_node_are_an_error_on_all_ranks() -> None:
    outcomes = run_workers(differ, 4)
    assert_all_raised(outcomes, errors.ConfigMismatchError, "lr: ?0.5|0.5", "rank 3")


def corrupt(rank: int, world_size: int) -> tuple[Caught | None, int]:
    optimizer = make_nodes(exchange=distlion.AllReduce())
    fault = faults.arm(
        rank=2, step=0, point="framed", action=lambda chunks: chunks[-1].bitwise_xor_(1)
    )
    set_some_grads(optimizer, 0, rank)
    return caught(optimizer, optimizer.step), fault.fired


def test_vote_that_is_damaged_is_an_error_on_all_ranks() -> None:
    outcomes = run_workers(corrupt, 4)
    assert outcomes[2][1] >= 1, "the fault did not fire"
    assert_all_raised([found for found, _ in outcomes], errors.CorruptFrameError, r"\b2\b")


def count_bytes(rank: int, world_size: int) -> tuple[bool, int, float]:
    optimizer = make_nodes(exchange=distlion.AllReduce())
    for step in range(2):
        set_some_grads(optimizer, step, rank)
        optimizer.step()
    traffic = optimizer.traffic
    equal = traffic.sent_bytes == 2 * optimizer.plan.sent_bytes
    return equal, traffic.node_sent_bytes, traffic.sent_bytes


def test_bytes_between_nodes_are_planned_and_those_inside_counted_apart() -> None:
    for equal, inside, between in run_workers(count_bytes, 4):
        assert equal
        assert between > 0
        # Half of all gradients, in float32, two times.
        assert inside >= 2 * 4 * (15070 // 2 - UNIT)


def resume(
    rank: int, world_size: int, rule: Aggregation
) -> tuple[list[np.ndarray], list[np.ndarray], Caught | None]:
    first = make_nodes(aggregation=rule)
    for step in range(2):
        set_some_grads(first, step, rank)
        first.step()
    second = make_nodes(aggregation=rule)
    with torch.no_grad():
        for ours, theirs in zip(params_of(second), params_of(first), strict=True):
            ours.copy_(theirs)
    second.load_state_dict(first.state_dict())
    for optimizer in (first, second):
        set_some_grads(optimizer, 2, rank)
        optimizer.step()
    misfit = second.state_dict()
    misfit["state"][1] = {"exp_avg": torch.zeros(17)}
    found = caught(second, lambda: second.load_state_dict(misfit))
    ends = [[p.detach().numpy() for p in params_of(each)] for each in (first, second)]
    return ends[0], ends[1], found


def give_up(rank: int, world_size: int) -> tuple[Caught | None, int]:
    optimizer = make_nodes(overlap=True, bucket_elements=2000)
    grads = [np.ones(p.numel(), np.float32) for p in params_of(optimizer)]
    run_backward(optimizer, grads)
    found = caught(optimizer, optimizer.zero_grad)
    run_backward(optimizer, grads)
    optimizer.step()
    return found, optimizer.committed_step


def test_step_that_all_ranks_of_all_nodes_give_up_never_was() -> None:
    assert run_workers(give_up, 4) == [(None, 1)] * 4


def skip(rank: int, world_size: int) -> Caught | None:
    optimizer = make_nodes(nodes=distlion.Nodes(ranks_per_node=3))
    set_some_grads(optimizer, 0, rank)
    if rank == 2:
        for group in optimizer.param_groups:
            group["step"] += 1
    return caught(optimizer, optimizer.step)


def test_rank_of_a_node_at_another_step_is_named_by_all() -> None:
    outcomes = run_workers(skip, 3)
    assert {found.kind for found in outcomes if found} == {"StepMismatchError"}
    assert {found.culprits for found in outcomes if found} == {(2,)}


def load_whole(rank: int, world_size: int) -> bool:
    optimizer = make_nodes()
    params = params_of(optimizer)
    whole = {
        i: {"exp_avg": torch.randn(p.shape, generator=torch.Generator().manual_seed(i))}
        for i, p in enumerate(params)
    }
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": whole})
    cutter, local = Cutter(2, UNIT), rank % 2
    cuts = [cutter.cut(p.numel())[local] for p in params]
    return all(
        torch.equal(optimizer.state[p]["exp_avg"], whole[i]["exp_avg"].view(-1)[start:stop])
        for i, (p, (start, stop)) in enumerate(zip(params, cuts, strict=True))
    )


def test_whole_momenta_of_another_lion_are_cut_to_the_ranks_part() -> None:
    assert run_workers(load_whole, 4) == [True] * 4


def freeze(rank: int, world_size: int) -> int:
    """A parameter that is frozen later moves no piece of the others, and its state loads."""
    optimizer = make_nodes()
    set_some_grads(optimizer, 0, rank)
    optimizer.step()
    params = params_of(optimizer)
    params[0].requires_grad_(False)
    params[0].grad = None
    optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(9000)))]})
    optimizer.load_state_dict(optimizer.state_dict())
    for p in params_of(optimizer)[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.verify_replicas()
    return optimizer.committed_step


def test_parameter_that_is_frozen_later_moves_no_piece() -> None:
    assert run_workers(freeze, 4) == [2] * 4


def scale_half(rank: int, world_size: int) -> tuple[float, float]:
    """A small gradient in float16, scaled up: unscaled in float16 it would vanish."""
    param = torch.nn.Parameter(torch.ones(100, dtype=torch.float16))
    optimizer = distlion.DistributedLion([param], lr=1e-2, nodes=distlion.Nodes(ranks_per_node=2))
    param.grad = torch.full_like(param, 1e-2)
    optimizer.grad_scale = torch.tensor(65536.0 if rank % 2 else 32768.0)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    exp_avg = optimizer.state[param]["exp_avg"]
    mean = (float(torch.tensor(1e-2, dtype=torch.float16)) / 65536 * 1.5) * (1 - 0.95)
    return (float(exp_avg.max()) if exp_avg.numel() else mean), mean


def test_scaled_float16_gradients_are_averaged_before_they_are_unscaled() -> None:
    for found, mean in run_workers(scale_half, 4):
        # One rounding of the mean to float16, half an ulp of 2^-11, and some of float32.
        assert found == pytest.approx(mean, rel=2**-11 + 2**-20)


@pytest.mark.parametrize("rule", [distlion.MajorityVote(), distlion.FeedbackVote()])
def test_state_of_a_part_resumes_to_the_same_bits_and_a_misfit_is_refused(
    rule: Aggregation,
) -> None:
    for uninterrupted, resumed, found in run_workers(resume, 4, rule):
        assert all(np.array_equal(a, b) for a, b in zip(uninterrupted, resumed, strict=True))
        assert found is not None
        assert found.kind == "CheckpointError"
        assert "part" in found.text


def refuse(rank: int, world_size: int) -> list[Caught | None]:
    makers = (
        lambda: make_nodes(nodes=distlion.Nodes(ranks_per_node=2)),
        lambda: make_nodes(nodes=distlion.Nodes()),
    )
    return [caught(None, maker) for maker in makers]


def test_workers_that_are_no_multiple_of_a_node_are_refused() -> None:
    for multiple, unknown in run_workers(refuse, 3):
        assert multiple is not None
        assert "multiple" in multiple.text
        assert unknown is not None
        assert "LOCAL_WORLD_SIZE" in unknown.text


@pytest.mark.parametrize("size", [0, -1])
def test_nodes_without_ranks_are_refused(size: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="ranks_per_node"):
        distlion.Nodes(ranks_per_node=size)


def test_nodes_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(errors.UnsupportedTypeError, match="ranks_per_node"):
        distlion.Nodes(ranks_per_node=2.0)  # type: ignore[arg-type]
    with pytest.raises(errors.UnsupportedTypeError, match="nodes"):
        distlion.DistributedLion([torch.nn.Parameter(torch.ones(1))], nodes=2)  # type: ignore[arg-type]
