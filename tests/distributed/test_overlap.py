"""Overlap with backward: the same bits, one order on all ranks, and nothing changed on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import distlion
import matrix
import oracle
from cluster import run_workers
from distlion import errors
from failures import Caught, assert_all_raised, assert_raised, caught, make_optimizer, params_of
from replay import Case, GroupSpec, Outcome, assert_equal_to_the_bit, play_all, run_backward
from tiers import in_tiers

pytestmark = pytest.mark.distributed

# Two rules, so that buckets of one hold those of the other; sizes that make several of each.
GROUPS = (
    GroupSpec(distlion.MajorityVote(), (1, 65, 513, 4097), lr=2e-3, weight_decay=0.1),
    GroupSpec(distlion.QuantizedVote(bits=4, step=0.5), (64, 9001), lr=3e-3),
    GroupSpec(distlion.Average(), (700, 3), lr=1e-3, dtype="bfloat16"),
)
BASE = Case("base", GROUPS, steps=6, seed=11, absent=True, exchange=distlion.AllReduce())
PATTERNS: dict[str, Any] = {"auto": "auto", **matrix.PATTERNS}
OVERLAPPED = {
    name: replace(BASE, name=name, exchange=pattern, overlap=True, bucket_elements=1024)
    for name, pattern in PATTERNS.items()
}
ACCUMULATED = replace(BASE, name="accumulated", micro_steps=3)
BOTH = replace(ACCUMULATED, name="accumulated, overlapped", overlap=True, bucket_elements=1024)
CHOSEN = replace(BASE, name="buckets chosen", overlap=True)


each_world_size = pytest.mark.parametrize("world_size", in_tiers(range(1, 9), lambda n: n == 3))


@functools.cache
def outcomes_of(world_size: int) -> list[dict[str, Outcome]]:
    cases = (BASE, *OVERLAPPED.values(), ACCUMULATED, BOTH, CHOSEN)
    return run_workers(play_all, world_size, cases, timeout_s=120, measured=world_size == 3)


@each_world_size
@pytest.mark.parametrize("variant", [*PATTERNS, CHOSEN.name])
def test_overlap_changes_no_bit(world_size: int, variant: str) -> None:
    for rank, outcomes in enumerate(outcomes_of(world_size)):
        assert_equal_to_the_bit(outcomes[variant], outcomes["base"], f"rank {rank}")


@each_world_size
def test_overlap_changes_no_bit_of_three_accumulated_micro_steps(world_size: int) -> None:
    for rank, outcomes in enumerate(outcomes_of(world_size)):
        assert_equal_to_the_bit(outcomes[BOTH.name], outcomes[ACCUMULATED.name], f"rank {rank}")
        ends = [np.concatenate(outcomes[name].params) for name in ("base", ACCUMULATED.name)]
        assert not np.array_equal(*ends), "accumulation made no difference"


def make_overlapped(**options: Any) -> distlion.DistributedLion:
    params = [
        (f"p{index}", torch.nn.Parameter(torch.full((n,), 0.5)))
        for index, n in enumerate((200, 300, 400))
    ]
    settings = {
        "lr": 1e-2,
        "overlap": True,
        "bucket_elements": 256,
        "timeouts": distlion.Timeouts(step_s=20),
    }
    return distlion.DistributedLion(params, **(settings | options))


def backward(optimizer: Any, step: int, rank: int, leave_out: int | None = None) -> None:
    run_backward(
        optimizer,
        [
            None if index == leave_out else oracle.gradient(3, step, rank, index, p.numel())
            for index, p in enumerate(params_of(optimizer))
        ],
    )


def step_well(optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, step, rank)
    optimizer.step()


def watch_buckets(rank: int, world_size: int) -> tuple[bool, bool, int]:
    optimizer = make_overlapped()
    backward(optimizer, 0, rank)
    started = optimizer._session.overlap._n_started > 0
    optimizer.step()
    optimizer.zero_grad()
    backward(optimizer, 1, rank, leave_out=2)  # the last parameter is in the first bucket
    held = optimizer._session.overlap._n_started == 0
    optimizer.step()
    return started, held, optimizer.committed_step


def test_votes_leave_during_backward_and_wait_for_earlier_buckets() -> None:
    assert run_workers(watch_buckets, 2) == [(True, True, 2)] * 2


def clip(optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 1e-3)


def again(optimizer: Any) -> None:
    run_backward(optimizer, [np.ones(p.numel(), np.float32) for p in params_of(optimizer)])


def change_lr(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def lose_lr(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = float("nan")


BETWEEN: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "clipping outside": (clip, errors.GradientChangedError, "p2|p1|p0"),
    "a second backward": (again, errors.GradientChangedError, "no_sync"),
    "another lr": (change_lr, errors.GradientChangedError, "lr"),
    "an lr out of range": (lose_lr, errors.GradientChangedError, "lr"),
}


def change_between(
    rank: int, world_size: int, what: str, who: tuple[int, ...]
) -> tuple[Caught | None, int]:
    """Change something after backward on some ranks; the step after it goes well again."""
    optimizer = make_overlapped()
    step_well(optimizer, 0, rank)
    optimizer.zero_grad()
    backward(optimizer, 1, rank)
    if rank in who:
        BETWEEN[what][0](optimizer)
    found = caught(optimizer, optimizer.step)
    optimizer.param_groups[0]["lr"] = 1e-2
    step_well(optimizer, 2, rank)
    optimizer.verify_replicas()
    return found, optimizer.committed_step


@pytest.mark.parametrize(
    "who",
    in_tiers([((1,),), ((0, 1, 2),)], lambda case: len(case[0]) == 1),
    ids=["one rank", "all ranks"],
)
@pytest.mark.parametrize("what", BETWEEN)
def test_what_changes_between_backward_and_step_is_an_error_on_all(
    what: str, who: tuple[int, ...]
) -> None:
    outcomes = run_workers(change_between, 3, what, who)
    _, kind, fragment = BETWEEN[what]
    assert_all_raised([found for found, _ in outcomes], kind, fragment, r"\b1\b")
    assert [committed for _, committed in outcomes] == [2, 2, 2]
    assert {found.culprits for found, _ in outcomes if found} == {who}


def give_up(
    rank: int, world_size: int, who: tuple[int, ...]
) -> tuple[Caught | None, list[np.ndarray], int]:
    optimizer = make_overlapped()
    step_well(optimizer, 0, rank)
    optimizer.zero_grad()
    backward(optimizer, 1, rank)
    found = caught(optimizer, optimizer.zero_grad if rank in who else optimizer.step)
    step_well(optimizer, 2, rank)
    optimizer.verify_replicas()
    return found, [p.detach().numpy() for p in params_of(optimizer)], optimizer.committed_step


def leave_out(rank: int, world_size: int) -> list[np.ndarray]:
    optimizer = make_overlapped(overlap=False)
    step_well(optimizer, 0, rank)
    step_well(optimizer, 2, rank)
    return [p.detach().numpy() for p in params_of(optimizer)]


def test_step_that_all_give_up_is_as_if_it_had_never_begun() -> None:
    expected = run_workers(leave_out, 3)
    for (found, params, committed), wanted in zip(
        run_workers(give_up, 3, (0, 1, 2)), expected, strict=True
    ):
        assert found is None
        assert committed == 2
        assert all(np.array_equal(a, b) for a, b in zip(params, wanted, strict=True))


@pytest.mark.parametrize(
    "pattern",
    in_tiers(matrix.PATTERNS.values(), lambda pattern: pattern.counts_in_parts),
    ids=matrix.PATTERNS,
)
def test_step_that_one_rank_gives_up_is_an_error_on_all(pattern: Any) -> None:
    outcomes = run_workers(give_up_one, 3, pattern)
    assert_all_raised(outcomes, errors.StepMismatchError, "rank 1", "gave this step up")
    assert {found.culprits for found in outcomes} == {(1,)}


def give_up_one(rank: int, world_size: int, pattern: Any) -> Caught | None:
    optimizer = make_overlapped(exchange=pattern)
    backward(optimizer, 0, rank)
    return caught(optimizer, optimizer.zero_grad if rank == 1 else optimizer.step)


def call_between(rank: int, world_size: int) -> list[Caught | None]:
    optimizer = make_overlapped()
    backward(optimizer, 0, rank)
    calls = (
        optimizer.verify_replicas,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
    )
    found = [caught(optimizer, call) for call in calls]
    optimizer.step()
    return found


def test_calls_while_votes_are_under_way_are_refused() -> None:
    for outcomes in run_workers(call_between, 2):
        for found in outcomes:
            assert assert_raised(
                found, errors.InvalidArgumentError, "under way|have left"
            ).unchanged


def scale(rank: int, world_size: int) -> tuple[Caught | None, int]:
    optimizer = make_overlapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    params = params_of(optimizer)
    scaler.scale(sum(p.sum() for p in params)).backward()
    found = caught(optimizer, lambda: scaler.step(optimizer))
    return found, optimizer.committed_step


def test_gradscaler_is_refused() -> None:
    for found, committed in run_workers(scale, 2):
        assert assert_raised(found, errors.InvalidArgumentError, "GradScaler").unchanged
        assert committed == 0


def test_clipping_inside_is_refused_together_with_overlap() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(errors.InvalidArgumentError, match="clip_norm"):
        distlion.DistributedLion([param], overlap=True, clip_norm=distlion.ClipNorm(1.0))


def run_model(rank: int, world_size: int, overlap: bool) -> list[np.ndarray]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)
    )
    optimizer = distlion.DistributedLion(
        model.parameters(), lr=1e-2, overlap=overlap, bucket_elements=1500
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        model(torch.randn(8, 16, generator=data)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in model.parameters()]


def test_real_model_with_a_schedule_ends_with_the_same_bits() -> None:
    without = run_workers(run_model, 3, False)
    with_overlap = run_workers(run_model, 3, True)
    for ours, expected in zip(with_overlap, without, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, expected, strict=True))


def zero_early(rank: int, world_size: int) -> tuple[int, list[Caught | None]]:
    """Give up after a whole backward of one bucket, and after a part of several."""
    found = []
    for bucket_elements in (1 << 20, 256):
        optimizer = make_overlapped(bucket_elements=bucket_elements)
        for leave_out in (None, 2):  # without the last parameter, no bucket is full
            backward(optimizer, 0, rank, leave_out=leave_out)
            found.append(caught(optimizer, optimizer.zero_grad))
        # One rank did not use the last layer: nothing of it has left, of the others it has.
        backward(optimizer, 0, rank, leave_out=2 if rank == 1 else None)
        found.append(caught(optimizer, optimizer.zero_grad))
        step_well(optimizer, 0, rank)
        optimizer.verify_replicas()
    return optimizer.committed_step, found


def test_gradients_are_forgotten_by_zero_grad_however_far_they_came() -> None:
    for committed, found in run_workers(zero_early, 3):
        assert found == [None] * 6
        assert committed == 1


def reduce_between(rank: int, world_size: int) -> tuple[float, int]:
    optimizer = make_overlapped(timeouts=distlion.Timeouts(step_s=10))
    total = 0.0
    for step in range(3):
        optimizer.zero_grad()
        backward(optimizer, step, rank)
        metric = torch.tensor(float(rank))
        torch.distributed.all_reduce(metric)
        total += float(metric)
        optimizer.step()
    return total, optimizer.committed_step


def test_callers_own_collectives_between_backward_and_step_do_not_mix_with_votes() -> None:
    assert run_workers(reduce_between, 3) == [(9.0, 3)] * 3


def arrive_twice(rank: int, world_size: int) -> Caught | None:
    """Let a gradient arrive again with nothing to see: written through ``data``, as wrappers do."""
    optimizer = make_optimizer(overlap=True, bucket_elements=64)
    overlap = optimizer._session.overlap
    assert overlap is not None
    for number, bucket in enumerate(overlap._buckets):
        for param in bucket.params:
            param.param.grad = torch.ones_like(param.param)
            overlap.note_arrival(id(param.param))
            if rank == 1 and number == 0:
                param.param.grad.data.add_(1.0)
                overlap.note_arrival(id(param.param))
    return caught(optimizer, optimizer.step)


def test_a_gradient_that_arrives_twice_is_an_error_although_it_looks_the_same() -> None:
    outcomes = run_workers(arrive_twice, 2)
    assert_all_raised(outcomes, errors.GradientChangedError, "second", "rank 1")


REFUSED: dict[str, tuple[tuple[int, ...], str]] = {
    "step, all": ((0, 1), "step"),
    "zero_grad, all": ((0, 1), "zero_grad"),
    "step, one": ((1,), "step"),
    "zero_grad, one": ((1,), "zero_grad"),
}


def lose_lr_before(rank: int, world_size: int) -> dict[str, list[Caught | None]]:
    """Lose lr before a backward pass, make a call, and go on where all may."""
    found: dict[str, list[Caught | None]] = {}
    for name, (who, call) in REFUSED.items():
        optimizer = make_overlapped(exchange=distlion.AllReduce())
        if rank in who:
            lose_lr(optimizer)
        passed = caught(optimizer, lambda optimizer=optimizer: backward(optimizer, 0, rank))
        found[name] = [passed, caught(optimizer, getattr(optimizer, call))]
        optimizer.param_groups[0]["lr"] = 1e-2
        if len(who) == world_size:
            found[name].append(caught(optimizer, optimizer.verify_replicas))
            step_well(optimizer, 0, rank)
            assert optimizer.committed_step == 1
    return found


@functools.cache
def refused() -> list[dict[str, list[Caught | None]]]:
    return run_workers(lose_lr_before, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hyperparameter_out_of_range_is_an_error_of_a_call_and_not_of_backward(name: str) -> None:
    for found in refused():
        passed, called, *after = found[name]
        assert passed is None
        if name.endswith("one"):
            lr = "lr of group 0: 0.01 on rank 0, but lr of group 0: nan on rank 1"
            assert assert_raised(called, errors.ConfigMismatchError, lr).unchanged
        else:
            assert after == [None]  # no vote is under way any more
            if name.startswith("step"):
                assert assert_raised(called, errors.StepInputError, "lr=nan").unchanged
            else:
                assert called is None


def refuse_once(rank: int, world_size: int) -> tuple[Caught | None, int]:
    """Let a step be refused on rank 0 after its votes have left, and make the call again."""
    optimizer = make_overlapped()
    backward(optimizer, 0, rank)
    refused = None
    if rank == 0:
        optimizer._session.lifecycle._under_way = "another call"
        refused = caught(None, optimizer.step)
        optimizer._session.lifecycle._under_way = None
    optimizer.step()
    optimizer.verify_replicas()
    return refused, optimizer.committed_step


def test_a_step_that_was_refused_once_keeps_the_votes_that_have_left() -> None:
    (refused, _), *others = outcomes = run_workers(refuse_once, 2)
    assert refused is not None
    assert refused.kind == "ConcurrentCallError"
    assert [step for _, step in outcomes] == [1, 1]
    assert others[0][0] is None


def test_a_parameter_that_is_no_leaf_is_refused_together_with_overlap() -> None:
    param = torch.nn.Parameter(torch.ones(3)) * 2
    param.retain_grad()
    with pytest.raises(errors.InvalidArgumentError, match="p, which is not a leaf"):
        distlion.DistributedLion([("p", param)], lr=0.1, overlap=True)
    assert distlion.DistributedLion([("p", param)], lr=0.1).param_groups
