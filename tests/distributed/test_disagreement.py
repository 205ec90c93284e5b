"""Workers that disagree on settings or steps all learn it, before anything is committed."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    await_waits,
    bfloat16_params,
    caught,
    give_time,
    lose_patience,
    make_optimizer,
    make_params,
    note_wait,
    set_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

THIRD = {"third": 20}

DISAGREEMENTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "shape": (
        lambda: make_optimizer(make_params({"first": 70, "second": 131})),
        ("second", "130", "131"),
    ),
    "number of parameters": (
        lambda: make_optimizer(make_params({"first": 70})),
        ("second|parameters",),
    ),
    "number of groups": (
        lambda: make_optimizer([{"params": each} for each in (make_params(), make_params(THIRD))]),
        ("third, .* on rank 1, but not on ranks 0, 2",),
    ),
    "order": (
        lambda: make_optimizer(make_params({"second": 130, "first": 70})),
        ("first", "second"),
    ),
    "same shapes in another order": (
        lambda: make_optimizer(make_params({"b": 70, "a": 70})),
        ("a", "b"),
    ),
    "dtype": (
        lambda: make_optimizer(bfloat16_params()),
        ("bfloat16", "float32"),
    ),
    "lr": (lambda: make_optimizer(lr=2e-2), ("lr", "0.02", "0.01")),
    "betas": (lambda: make_optimizer(betas=(0.95, 0.98)), ("betas", "0.95", "0.9")),
    "cautious": (lambda: make_optimizer(cautious=True), ("cautious", "True", "False")),
    "weight decay": (lambda: make_optimizer(weight_decay=0.125), ("weight_decay", "0.125")),
    "rule": (
        lambda: make_optimizer(aggregation=distlion.TernaryVote()),
        ("TernaryVote", "MajorityVote"),
    ),
    "setting of a rule": (
        lambda: make_optimizer(aggregation=distlion.MajorityVote(tie="zero")),
        ("MajorityVote", "zero", "random"),
    ),
    "pattern": (lambda: make_optimizer(exchange=distlion.AllGather()), ("AllGather", "exchange")),
    "seed": (lambda: make_optimizer(seed=1), ("seed",)),
    "policy": (lambda: make_optimizer(nonfinite="skip"), ("nonfinite", "skip", "raise")),
    "rounding": (
        lambda: make_optimizer(
            bfloat16_params(), precision=distlion.Precision(rounding="stochastic")
        ),
        ("rounding", "stochastic", "nearest"),
    ),
    "momentum dtype": (
        lambda: make_optimizer(precision=distlion.Precision(exp_avg=torch.bfloat16)),
        ("exp_avg=torch.bfloat16",),
    ),
    "buckets": (lambda: make_optimizer(bucket_elements=64), ("bucket",)),
    "checks": (lambda: make_optimizer(replicas=distlion.Replicas(check_every=7)), ("check_every",)),
    "library version": (lambda: with_version("0.0.0.dev999"), ("version", "0.0.0.dev999")),
}


def with_version(version: str) -> distlion.DistributedLion:
    """Pretend that another version is installed, wherever the library has the function from."""
    genuine = importlib.metadata.version

    def pretend(name: str) -> str:
        return version if name == "distlion" else genuine(name)

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("importlib", "distlion"):
            for key, value in list(vars(module).items()):
                if value is genuine or getattr(value, "__wrapped__", None) is genuine:
                    setattr(module, key, pretend)
                elif key == "__version__":
                    setattr(module, key, version)
    return make_optimizer()


def disagree(rank: int, world_size: int, name: str, odd_rank: int) -> Caught | None:
    if rank == odd_rank:
        return caught(None, DISAGREEMENTS[name][0])
    if name == "same shapes in another order":
        return caught(None, lambda: make_optimizer(make_params({"a": 70, "b": 70})))
    return caught(None, lambda: make_optimizer(bfloat16_params() if name == "rounding" else None))


QUICK = (
    "number of parameters",
    "number of groups",
    "cautious",
    "setting of a rule",
    "momentum dtype",
)
"""Of parameters, of a group, of a rule, and of the optimizer as a whole."""


@pytest.mark.parametrize("name", in_tiers(DISAGREEMENTS, lambda name: name in QUICK))
def test_disagreement_at_construction_is_an_error_on_every_rank(name: str) -> None:
    outcomes = run_workers(disagree, 3, name, 1)
    assert_all_raised(outcomes, errors.ConfigMismatchError, *DISAGREEMENTS[name][1], r"\b1\b")
    for outcome in outcomes:
        assert outcome is not None and outcome.culprits == (1,)
        assert "since this optimizer was made" not in outcome.text


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_disagreement_of_two_workers_is_an_error_on_both(odd_rank: int) -> None:
    assert_all_raised(
        run_workers(disagree, 2, "shape", odd_rank),
        errors.ConfigMismatchError,
        "second",
        "130",
        "131",
    )


def disagree_later(rank: int, world_size: int, key: str, value: Any) -> Caught | None:
    optimizer = make_optimizer()
    for step in range(4):
        set_grads(optimizer, step, rank)
        if step == 3 and rank == 2:
            optimizer.param_groups[0][key] = value
        found = caught(optimizer, optimizer.step)
        if found is not None:
            assert step == 3, found
            return found
    return None


@pytest.mark.parametrize(
    ("key", "value"),
    in_tiers(
        [("lr", 3e-2), ("weight_decay", 0.25), ("betas", (0.5, 0.99))],
        lambda case: case[0] == "betas",
    ),
)
def test_rank_with_another_setting_at_one_step_is_an_error_on_every_rank(
    key: str, value: Any
) -> None:
    outcomes = run_workers(disagree_later, 3, key, value)
    assert_all_raised(outcomes, errors.ConfigMismatchError, key, r"\b2\b")
    for outcome in outcomes:
        assert outcome is not None and (outcome.step, outcome.committed_step, outcome.culprits) == (
            3,
            3,
            (2,),
        )


NO_SETTINGS = {
    "not a number": ("lr", float("nan")),
    "a word": ("lr", "fast"),
    "one beta": ("betas", (0.9,)),
    "no betas": ("betas", None),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True, "bucket_elements": 64},
    "clipping in nodes": {
        "nodes": distlion.Nodes(ranks_per_node=2),
        "clip_norm": distlion.ClipNorm(1.0, scope="global"),
    },
}


def leave_range(
    rank: int, world_size: int, name: str, form: str, odd_ranks: tuple[int, ...]
) -> tuple[Caught | None, int]:
    """Set what no step can be done with on some ranks; go on where that is an error of all."""
    key, value = NO_SETTINGS[name]
    optimizer = make_optimizer(**FORMS[form])
    set_grads(optimizer, 0, rank)
    optimizer.step()
    set_grads(optimizer, 1, rank)
    before = optimizer.param_groups[0][key]
    if rank in odd_ranks:
        optimizer.param_groups[0][key] = value
    found = caught(optimizer, optimizer.step)
    if len(odd_ranks) == world_size:
        optimizer.param_groups[0][key] = before
        optimizer.step()
    return found, optimizer.committed_step


@pytest.mark.parametrize(
    ("name", "form"),
    in_tiers(
        [*((name, "plain") for name in NO_SETTINGS), *(("a word", f) for f in list(FORMS)[1:])],
        lambda case: case in (("one beta", "plain"), ("a word", "clipping in nodes")),
    ),
)
def test_a_setting_out_of_range_at_one_step_is_an_error_on_every_rank(name: str, form: str) -> None:
    outcomes = [found for found, _ in run_workers(leave_range, 4, name, form, (2,))]
    key, value = NO_SETTINGS[name]
    said = re.escape(f"{key} of group 0: {value!r} on rank 2")
    assert_all_raised(outcomes, errors.ConfigMismatchError, said)
    for outcome in outcomes:
        assert outcome is not None and (outcome.step, outcome.culprits) == (1, (2,))


def test_a_setting_out_of_range_on_all_ranks_is_told_as_such_and_they_go_on() -> None:
    for found, steps in run_workers(leave_range, 2, "not a number", "plain", (0, 1)):
        assert assert_raised(found, errors.StepInputError, "lr=nan").unchanged
        assert steps == 2


def add_group_on_one(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer()
    size = 65 if rank == 1 else 64
    group = {"params": [("late", torch.nn.Parameter(torch.zeros(size)))]}
    return caught(None, lambda: optimizer.add_param_group(group))


def test_added_groups_that_differ_are_an_error_on_every_rank() -> None:
    outcomes = run_workers(add_group_on_one, 3)
    assert_all_raised(outcomes, errors.ConfigMismatchError, "late", "64", "65")


def skip_a_number(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer()
    for step in range(3):
        set_grads(optimizer, step, rank)
        if step == 2 and rank == 1:
            for group in optimizer.param_groups:
                group["step"] += 1
        found = caught(optimizer, optimizer.step)
        if found is not None:
            assert step == 2, found
            return found
    return None


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_that_is_a_step_ahead_is_an_error_on_every_rank(world_size: int) -> None:
    outcomes = run_workers(skip_a_number, world_size)
    assert_all_raised(outcomes, errors.StepMismatchError, r"\b2\b", r"\b3\b", r"rank")


def resume_older(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer()
    states = []
    for step in range(3):
        states.append(optimizer.state_dict())
        set_grads(optimizer, step, rank)
        optimizer.step()
    state = states[1 if rank == 2 else 2]
    return caught(optimizer, lambda: optimizer.load_state_dict(state))


def test_states_of_different_steps_are_an_error_on_every_rank_when_loaded() -> None:
    outcomes = run_workers(resume_older, 3)
    assert_all_raised(outcomes, errors.StepMismatchError, "step", r"\b1\b", r"\b2\b")


kept: list[distlion.DistributedLion] = []


def step_once_less(rank: int, world_size: int, keeps: bool) -> Caught | None:
    """Rank 1 leaves its loop; it ``keeps`` its optimizer, or lets it go."""
    give_time()
    optimizer = make_optimizer()
    if keeps:
        kept.append(optimizer)
    for step in range(3):
        if step == 2 and rank == 1:
            return None
        set_grads(optimizer, step, rank)
        if step == 2 and keeps and rank == 0:
            await_waits([2])
            lose_patience(optimizer)
        elif step == 2:
            note_wait(rank)
        found = caught(optimizer, optimizer.step)
        if found is not None:
            assert step == 2, found
            return found
    raise AssertionError("a step without rank 1 was committed")


def test_rank_that_does_not_come_ends_the_others_at_the_step_timeout() -> None:
    outcomes = run_workers(step_once_less, 3, True, timeout_s=20)
    for rank in (0, 2):
        found = assert_raised(
            outcomes[rank],
            errors.StepTimeoutError,
            "rank 1 runs, but did not come",
            "Timeouts.step_s",
        )
        assert found.unchanged and found.step == 2 and found.committed_step == 2
        assert found.culprits == (1,)


def test_rank_that_lets_its_optimizer_go_is_named_by_the_others_at_once() -> None:
    outcomes = run_workers(step_once_less, 3, False, timeout_s=20)
    for rank in (0, 2):
        found = assert_raised(
            outcomes[rank], errors.PeerLostError, "rank 1 is gone", "has let go of this optimizer"
        )
        assert found.unchanged and found.step == 2 and found.culprits == (1,)
