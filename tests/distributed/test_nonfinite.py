"""Values that are not finite: all raise, all skip, or that worker abstains, as asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import distlion
import oracle
from cluster import run_workers
from distlion import errors
from failures import (
    SIZES,
    Caught,
    assert_all_raised,
    caught,
    freeze_state,
    make_optimizer,
    make_params,
    params_of,
    set_grads,
)

pytestmark = pytest.mark.distributed


def meet_nonfinite(
    rank: int, world_size: int, policy: str, value: float
) -> tuple[list[Caught | None], list[Any]]:
    """Rank 1's second parameter has one bad coordinate at step 2."""
    optimizer = make_optimizer(nonfinite=policy, replicas=distlion.Replicas(check_every=1))
    found, ends = [], []
    for step in range(5):
        set_grads(optimizer, step, rank)
        if step == 2 and rank == 1:
            params_of(optimizer)[1].grad[7] = value
        before = freeze_state(optimizer)
        error = caught(optimizer, optimizer.step)
        found.append(error)
        ends.append((before == freeze_state(optimizer), optimizer.committed_step))
        if error is not None:
            break
    state = [p.detach().numpy().copy() for p in params_of(optimizer)]
    momenta = [optimizer.state[p]["exp_avg"].numpy().copy() for p in params_of(optimizer)]
    return found, [ends, state, momenta]


each_bad_value = pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "minus-inf"]
)


@each_bad_value
def test_gradient_that_is_not_finite_raises_on_every_rank(value: float) -> None:
    outcomes = run_workers(meet_nonfinite, 3, "raise", value)
    assert_all_raised(
        [found[-1] for found, _ in outcomes], errors.NonFiniteError, "second", r"\b1\b", "nonfinite"
    )
    for found, (_, _, momenta) in outcomes:
        assert (found[-1].step, found[-1].committed_step, found[-1].culprits) == (2, 2, (1,))
        assert all(np.isfinite(m).all() for m in momenta)


@each_bad_value
def test_all_ranks_skip_a_step_with_a_gradient_that_is_not_finite(value: float) -> None:
    outcomes = run_workers(meet_nonfinite, 3, "skip", value)
    group = oracle.Group(
        [np.full(n, 0.5, np.float32) for n in SIZES.values()], oracle.Rule("majority"), 1e-2
    )
    cluster = oracle.OracleCluster([group], 3)
    for step in (0, 1, 3, 4):
        cluster.step(
            [
                [oracle.gradient(9, step, r, i, n) for i, n in enumerate(SIZES.values())]
                for r in range(3)
            ]
        )
    for rank, (found, (ends, state, momenta)) in enumerate(outcomes):
        assert found == [None] * 5
        assert ends == [(False, 1), (False, 2), (True, 2), (False, 3), (False, 4)]
        # The number of a skipped step is used by the next one: coins and all are those of a run
        # without it.
        assert_same(state, cluster.params)
        assert_same(momenta, cluster.exp_avgs[rank])


@each_bad_value
def test_worker_abstains_for_a_parameter_whose_gradient_is_not_finite(value: float) -> None:
    outcomes = run_workers(meet_nonfinite, 3, "abstain", value)
    group = oracle.Group(
        [np.full(n, 0.5, np.float32) for n in SIZES.values()], oracle.Rule("majority"), 1e-2
    )
    cluster = oracle.OracleCluster([group], 3, nonfinite="abstain")
    for step in range(5):
        grads = [
            [oracle.gradient(9, step, r, i, n) for i, n in enumerate(SIZES.values())]
            for r in range(3)
        ]
        if step == 2:
            grads[1][1][7] = value
        cluster.step(grads)
    for rank, (found, (_, state, momenta)) in enumerate(outcomes):
        assert found == [None] * 5
        assert all(np.isfinite(m).all() for m in momenta)
        assert_same(state, cluster.params)
        assert_same(momenta, cluster.exp_avgs[rank])


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(oracle.bits_of(ours), oracle.bits_of(theirs))


def overflow_by_momentum(rank: int, world_size: int) -> Caught | None:
    """Only the new momentum of rank 1 is not finite: it overflows when rounded to bfloat16.

    The largest float32 lies above the largest bfloat16 by more than half a step, and beta2 = 0
    makes it the momentum.
    """
    optimizer = make_optimizer(
        betas=(0.5, 0.0), precision=distlion.Precision(exp_avg=torch.bfloat16)
    )
    set_grads(optimizer, 0, rank)
    if rank == 1:
        params_of(optimizer)[1].grad.fill_(float(np.finfo(np.float32).max))
    return caught(optimizer, optimizer.step)


def test_new_momentum_that_is_not_finite_is_seen_although_the_gradient_is() -> None:
    outcomes = run_workers(overflow_by_momentum, 3)
    assert_all_raised(outcomes, errors.NonFiniteError, "second", r"\b1\b")


def vote_with_bad_momentum(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    if rank == 1:
        optimizer.state[params_of(optimizer)[1]]["exp_avg"][3] = float("nan")
    return caught(optimizer, optimizer.step)


def test_direction_that_is_not_finite_is_seen_although_the_gradient_is() -> None:
    outcomes = run_workers(vote_with_bad_momentum, 3)
    assert_all_raised(outcomes, errors.NonFiniteError, "second", r"\b1\b")


def sparse_step(rank: int, world_size: int, rank_with_sparse: int | None) -> Caught | None:
    embedding = torch.nn.Embedding(10, 4, sparse=rank_with_sparse in (None, rank))
    optimizer = make_optimizer(list(embedding.named_parameters()))
    embedding(torch.tensor([rank, 3])).sum().backward()
    return caught(optimizer, optimizer.step)


@pytest.mark.parametrize("rank_with_sparse", [None, 1])
def test_sparse_gradient_is_an_error_on_every_rank(rank_with_sparse: int | None) -> None:
    outcomes = run_workers(sparse_step, 3, rank_with_sparse)
    assert_all_raised(outcomes, errors.SparseGradientError, "weight", "sparse=False")


def scaled_steps(
    rank: int, world_size: int, policy: str, overflow_at: int | None, unscale: bool = False
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    named = make_params()
    optimizer = make_optimizer(named, nonfinite=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    history = []
    for step in range(4):
        grads = [
            torch.from_numpy(oracle.gradient(9, step, rank, i, p.numel()))
            for i, (_, p) in enumerate(named)
        ]
        loss = sum((p * g).sum() for (_, p), g in zip(named, grads, strict=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == overflow_at and rank == 1:
            named[0][1].grad[3] = float("inf")
        if unscale:  # as whoever clips gradients does
            scaler.unscale_(optimizer)
        error = caught(optimizer, lambda: scaler.step(optimizer))
        scaler.update()
        history.append((error, optimizer.committed_step))
        if error is not None:
            break
    return history, [p.detach().numpy().copy() for _, p in named], scaler.state_dict()


def test_scaled_gradients_give_the_bits_of_unscaled_ones() -> None:
    """The scale is a power of two, so unscaling is exact."""
    group = oracle.Group(
        [np.full(n, 0.5, np.float32) for n in SIZES.values()], oracle.Rule("majority"), 1e-2
    )
    cluster = oracle.OracleCluster([group], 3)
    for step in range(4):
        cluster.step(
            [
                [oracle.gradient(9, step, r, i, n) for i, n in enumerate(SIZES.values())]
                for r in range(3)
            ]
        )
    for history, params, _ in run_workers(scaled_steps, 3, "raise", None):
        assert history == [(None, 1), (None, 2), (None, 3), (None, 4)]
        assert_same(params, cluster.params)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled before"])
def test_infinity_found_by_one_grad_scaler_makes_all_ranks_skip(unscale: bool, policy: str) -> None:
    outcomes = run_workers(scaled_steps, 3, policy, 2, unscale)
    for history, params, scaler in outcomes:
        assert history == [(None, 1), (None, 2), (None, 2), (None, 3)]
        assert_same(params, outcomes[0][1])
        assert scaler["scale"] == 2.0**9
        assert scaler["_growth_tracker"] == 1  # steps since the overflow


def train_in_half(rank: int, world_size: int) -> list[tuple[list[int], float, bool, str | None]]:
    """Train with the scaler of torch's guide, whose first scales overflow on rank 1 alone."""
    ended = []
    for nodes in (None, distlion.Nodes(ranks_per_node=2)):
        model = torch.nn.Linear(4, 2, bias=False)
        optimizer = make_optimizer(list(model.named_parameters()), nodes=nodes)
        scaler, inputs = torch.amp.GradScaler("cpu"), torch.full((3, 4), 0.5)
        begun, counts = model.weight.detach().clone(), []
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                # 65504 is float16's largest number, and 65536 the first scale
                loss = model(inputs).float().sum() * (1.5 if rank == 1 else 0.1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            counts.append(optimizer.committed_step)
        scale, moved = scaler.get_scale(), not torch.equal(model.weight, begun)
        model(inputs).sum().backward()
        if rank == 1:
            model.weight.grad[0, 0] = float("nan")
        found = caught(None, optimizer.step)
        ended.append((counts, scale, moved, found and found.kind))
    return ended


def test_a_grad_scaler_with_its_defaults_searches_its_scale_and_other_steps_raise() -> None:
    ended = run_workers(train_in_half, 4)
    for (counts, *rest), _ in ended:
        assert counts == [0, 0, 1, 2]
        assert rest == [2.0**14, True, "NonFiniteError"]
    for by_rank in ended[1:]:
        assert by_rank == ended[0]


def scale_two(rank: int, world_size: int) -> tuple[list[int], float]:
    """One scaler for two optimizers, of which the first has an overflow on rank 1."""
    optimizers = [make_optimizer(nonfinite="skip") for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))  # a scale is made when it is first used
    for optimizer in optimizers:
        set_grads(optimizer, 0, rank)
    if rank == 1:
        params_of(optimizers[0])[0].grad[3] = float("inf")
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    disabled = torch.amp.GradScaler("cpu", enabled=False)
    params_of(optimizers[0])[0].grad.fill_(float("nan"))
    disabled.step(optimizers[0])
    disabled.update()
    return [optimizer.committed_step for optimizer in optimizers], scaler.get_scale()


def test_an_overflow_of_one_optimizer_skips_no_step_of_another_with_the_same_scaler() -> None:
    assert run_workers(scale_two, 2) == [([0, 1], 2.0**9)] * 2


def test_worker_whose_grad_scaler_overflows_abstains_and_keeps_its_scale_to_itself() -> None:
    """What overflows for good on one worker would take the scale of all others down with it."""
    outcomes = run_workers(scaled_steps, 3, "abstain", 2)
    for rank, (history, params, scaler) in enumerate(outcomes):
        assert history == [(None, 1), (None, 2), (None, 3), (None, 4)]
        assert_same(params, outcomes[0][1])
        assert scaler["scale"] == (2.0**9 if rank == 1 else 2.0**10)
