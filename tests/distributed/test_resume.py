"""Saved states resume to the same bits, and are refused where they do not fit."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import lion_pytorch
import numpy as np
import pytest
import torch

import distlion
import oracle
from cluster import run_workers
from distlion import errors
from oracle import Group, OracleCluster, Rule
from replay import (
    SIMPLE_SIZES,
    Case,
    GroupSpec,
    Outcome,
    assert_all_equal,
    assert_equal_to_the_bit,
    initial_values,
    make_optimizer,
    play_oracle,
    set_grads,
    simple_case,
    snapshot,
    worker_grads,
)

pytestmark = pytest.mark.distributed


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Write a state and read it again without running code from the file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def resume(rank: int, world_size: int, case: Case, at: int) -> Outcome:
    """Stop after ``at`` steps and go on with a new optimizer made with other settings."""
    optimizer = make_optimizer(case, rank=rank)
    for step in range(at):
        set_grads(optimizer, worker_grads(case, step, rank))
        optimizer.step()
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = saved(optimizer.state_dict())

    other = Case(
        case.name,
        tuple(
            GroupSpec(distlion.TernaryVote(), spec.sizes, 0.5, dtype=spec.dtype)
            for spec in case.groups
        ),
        seed=case.seed,
        rounding=case.rounding,
        exp_avg_dtype=case.exp_avg_dtype,
    )
    resumed = make_optimizer(other, rank=rank)
    params = [p for group in resumed.param_groups for p in group["params"]]
    for p, weight in zip(params, weights, strict=True):
        p.data.copy_(weight)
    resumed.load_state_dict(state)
    assert resumed.committed_step == at
    assert [group["aggregation"] for group in resumed.param_groups] == [
        spec.rule for spec in case.groups
    ]
    for step in range(at, case.steps):
        set_grads(resumed, worker_grads(case, step, rank))
        resumed.step()
    return snapshot(resumed)


RESUMED = {
    "float32": simple_case(steps=12),
    "bfloat16": simple_case(steps=12, dtype="bfloat16"),
    "bfloat16-with-float32-momenta": simple_case(
        steps=12, dtype="bfloat16", exp_avg_dtype="float32"
    ),
    "stochastic": simple_case(steps=12, dtype="bfloat16", rounding="stochastic"),
    "groups": Case(
        "groups",
        (
            GroupSpec(distlion.Average(), (65,), lr=1e-3, betas=(0.8, 0.9)),
            GroupSpec(distlion.QuantizedVote(bits=3, step=0.5), (66, 1), lr=2e-3, weight_decay=0.3),
            GroupSpec(distlion.MajorityVote(tie="zero"), (67,), lr=3e-3),
            GroupSpec(distlion.FullPrecision(torch.bfloat16), (68,), lr=3e-3),
            GroupSpec(distlion.TernaryVote(), (69,), lr=3e-3),
            GroupSpec(distlion.FeedbackVote(), (70, 1), lr=3e-3),
            GroupSpec(distlion.FeedbackVote(bits=1), (700,), lr=3e-3),
        ),
        steps=12,
        absent=True,
    ),
}


STOPS = (1, 6)


def resume_all(rank: int, world_size: int) -> dict[tuple[str, int], Outcome]:
    return {
        (name, at): resume(rank, world_size, case, at)
        for name, case in RESUMED.items()
        for at in STOPS
    }


@functools.cache
def resumed(world_size: int) -> list[dict[tuple[str, int], Outcome]]:
    return run_workers(resume_all, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("at", STOPS)
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("world_size", [1, 3])
def test_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    world_size: int, name: str, at: int
) -> None:
    outcomes = [each[name, at] for each in resumed(world_size)]
    assert_all_equal(outcomes, play_oracle(RESUMED[name], world_size))


def momentum_dtypes(rank: int, world_size: int) -> list[torch.dtype]:
    case = simple_case(dtype="bfloat16", exp_avg_dtype="float32")
    optimizer = make_optimizer(case, rank=rank)
    set_grads(optimizer, worker_grads(case, 0, rank))
    optimizer.step()
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    return [state["exp_avg"].dtype for state in optimizer.state.values()]


def test_float32_momenta_of_bfloat16_parameters_stay_float32_when_loaded() -> None:
    assert run_workers(momentum_dtypes, 2) == [[torch.float32] * len(SIMPLE_SIZES)] * 2


def plain_content(value: Any) -> bool:
    if isinstance(value, dict):
        return all(plain_content(k) and plain_content(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain_content, value))
    return value is None or type(value) in (int, float, str, bool, torch.Tensor)


def describe_state(rank: int, world_size: int) -> tuple[bool, list[str]]:
    optimizer = make_optimizer(RESUMED["groups"], rank=rank)
    state = optimizer.state_dict()
    return plain_content(state), [group["aggregation"] for group in state["param_groups"]]


def test_state_dict_holds_tensors_numbers_and_strings_only() -> None:
    for is_plain, rules in run_workers(describe_state, 2):
        assert is_plain
        assert rules == [repr(spec.rule) for spec in RESUMED["groups"].groups]


def load_lion_pytorch(
    rank: int, world_size: int, case: Case
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Load a checkpoint that knows neither rules nor step numbers, and take one step."""
    optimizer = make_optimizer(case, rank=rank)
    params = [torch.nn.Parameter(torch.from_numpy(v)) for v in initial_values(case)]
    reference = lion_pytorch.Lion(params, lr=3e-3, betas=(0.8, 0.9), weight_decay=0.25)
    set_grads(reference, lion_pytorch_grads(case))
    reference.step()
    state = saved(reference.state_dict())
    for index, entry in state["state"].items():
        if case.sizes[index] == 1:
            entry["exp_avg"] = entry["exp_avg"].reshape(())
    optimizer.load_state_dict(state)
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    set_grads(optimizer, worker_grads(case, 1, rank))
    optimizer.step()
    return snapshot(optimizer), settings


def lion_pytorch_grads(case: Case) -> list[oracle.F32 | None]:
    """The last parameter had no gradient yet, so that lion-pytorch saved no momentum for it."""
    grads: list[oracle.F32 | None] = [
        oracle.gradient(1, 0, 0, i, n) for i, n in enumerate(case.sizes)
    ]
    grads[-1] = None
    return grads


def test_checkpoint_of_lion_pytorch_loads() -> None:
    case = simple_case()
    group = Group(initial_values(case), Rule("majority"), 3e-3, (0.8, 0.9), 0.25)
    cluster = OracleCluster([group], 2, seed=case.seed)
    for index, grad in enumerate(lion_pytorch_grads(case)):
        if grad is not None:
            # lion-pytorch: exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2), from 0: one rounding.
            momentum = np.float32(1.0 - 0.9) * grad
            cluster.exp_avgs[0][index] = cluster.exp_avgs[1][index] = momentum
    cluster.step([worker_grads(case, 1, rank) for rank in range(2)])
    # worker_grads of step 1, but step number 0: the checkpoint carries none.
    for rank, (outcome, settings) in enumerate(run_workers(load_lion_pytorch, 2, case)):
        assert_equal_to_the_bit(
            outcome, Outcome(cluster.params, cluster.exp_avgs[rank]), f"rank {rank}"
        )
        for group_settings in settings:
            assert (group_settings["lr"], tuple(group_settings["betas"])) == (3e-3, (0.8, 0.9))
            assert group_settings["weight_decay"] == 0.25
            assert group_settings["aggregation"] == distlion.MajorityVote()


def refuse_states(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    case = simple_case()
    optimizer = make_optimizer(case, rank=rank)
    set_grads(optimizer, worker_grads(case, 0, rank))
    optimizer.step()
    results = {}
    for name, spoil in SPOILED.items():
        state = saved(optimizer.state_dict())
        spoil(state)
        before = snapshot(optimizer), [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(state)
        except Exception as error:
            results[name] = (type(error).__name__, str(error))
        else:
            results[name] = ("accepted", "")
        after = snapshot(optimizer)
        assert_equal_to_the_bit(after, before[0], name)
        for group, old in zip(optimizer.param_groups, before[1], strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in old.items() if k != "params"
            }
    return results


def spoil_shape(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(7)


def spoil_momentum(state: dict[str, Any]) -> None:
    del state["state"][1]["exp_avg"]


def spoil_rule(state: dict[str, Any]) -> None:
    state["param_groups"][0]["aggregation"] = "__import__('os').getcwd()"


def spoil_rule_name(state: dict[str, Any]) -> None:
    state["param_groups"][0]["aggregation"] = "MedianVote()"


def spoil_dtype(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(65, dtype=torch.int64)


def put_momentum(value: Any) -> Callable[[dict[str, Any]], None]:
    """Return what replaces a momentum by something else."""

    def spoil(state: dict[str, Any]) -> None:
        state["state"][1]["exp_avg"] = value

    return spoil


def put_in_group(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return what replaces a key of a group by something else."""

    def spoil(state: dict[str, Any]) -> None:
        state["param_groups"][0][key] = value

    return spoil


def spoil_groups(state: dict[str, Any]) -> None:
    state["param_groups"] = [7]


def spoil_params(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["params"]


def spoil_entry(state: dict[str, Any]) -> None:
    state["state"][1] = [torch.zeros(65)]


SPOILED = {
    "sparse momentum": put_momentum(torch.zeros(65).to_sparse()),
    "meta momentum": put_momentum(torch.zeros(65, device="meta")),
    "no momentum": put_momentum(None),
    "list momentum": put_momentum([0.0] * 65),
    "huge step": put_in_group("step", 2**70),
    "step that is a truth value": put_in_group("step", True),
    "huge rule": put_in_group("aggregation", "MajorityVote(" * 1_000_000),
    "rule of no kind": put_in_group("aggregation", 7),
    "lr of no kind": put_in_group("lr", "fast"),
    "negative lr": put_in_group("lr", -1.0),
    "another worker": put_in_group("worker", "1 of 8"),
    "groups of no kind": spoil_groups,
    "no params": spoil_params,
    "entry of no kind": spoil_entry,
    "shape": spoil_shape,
    "missing momentum": spoil_momentum,
    "code for a rule": spoil_rule,
    "unknown rule": spoil_rule_name,
    "integer momentum": spoil_dtype,
}


@functools.cache
def refused_states() -> list[dict[str, tuple[str, str]]]:
    return run_workers(refuse_states, 2)


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("shape", ("momentum", "(7,)", "(65,)")),
        ("missing momentum", ("momentum",)),
        ("code for a rule", ("__import__",)),
        ("unknown rule", ("MedianVote",)),
        ("integer momentum", ("int64",)),
        ("sparse momentum", ("sparse",)),
        ("meta momentum", ("meta",)),
        ("no momentum", ("no momentum",)),
        ("list momentum", ("list",)),
        ("huge step", ("step", "an integer above 2^53")),
        ("step that is a truth value", ("step", "True")),
        ("huge rule", ("13,000,000 characters",)),
        ("rule of no kind", ("aggregation", "7")),
        ("lr of no kind", ("lr", "fast")),
        ("negative lr", ("lr=-1.0",)),
        ("another worker", ("1 of 8", "on_world_change")),
        ("groups of no kind", ("param_groups",)),
        ("no params", ("params",)),
        ("entry of no kind", ("list",)),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(
    name: str, fragments: tuple[str, ...]
) -> None:
    for results in refused_states():
        kind, text = results[name]
        assert kind == errors.CheckpointError.__name__, text
        assert all(fragment in text for fragment in fragments), text
        assert len(text) < 1500


def refuse_one(rank: int, world_size: int) -> tuple[tuple[str, str], int]:
    case = simple_case()
    optimizer = make_optimizer(case, rank=rank)
    state = saved(optimizer.state_dict())
    if rank == 1:
        spoil_shape(state)
    before = snapshot(optimizer)
    try:
        optimizer.load_state_dict(state)
    except errors.DistlionError as error:
        found = type(error).__name__, str(error)
    assert_equal_to_the_bit(snapshot(optimizer), before, "refused")
    set_grads(optimizer, worker_grads(case, 0, rank))
    optimizer.step()
    return found, optimizer.committed_step


def test_a_state_that_fits_everywhere_but_on_one_rank_is_refused_on_all() -> None:
    for (kind, text), steps in run_workers(refuse_one, 3):
        assert kind == errors.CheckpointError.__name__
        assert "refused on rank 1" in text and "(7,)" in text, text
        assert steps == 1
