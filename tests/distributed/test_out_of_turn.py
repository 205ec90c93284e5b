"""Workers at different calls all learn it by a typed error, and none of them aborts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    caught,
    make_optimizer,
    params_of,
    set_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

Action = Callable[[distlion.DistributedLion], object]

OUT_OF_TURN: dict[str, Action] = {
    "verify_replicas": lambda optimizer: optimizer.verify_replicas(),
    "add_param_group": lambda optimizer: optimizer.add_param_group(
        {"params": [("added", torch.nn.Parameter(torch.zeros(5)))]}
    ),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


def call_on_one_rank(rank: int, world_size: int, call: str, buckets: int | None) -> Caught | None:
    optimizer = make_optimizer(bucket_elements=buckets)
    for step in range(2):
        set_grads(optimizer, step, rank)
        if step == 1 and rank == 1:
            return caught(optimizer, lambda: OUT_OF_TURN[call](optimizer))
        found = caught(optimizer, optimizer.step)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("buckets", [None, 64])
@pytest.mark.parametrize(
    "call", in_tiers(OUT_OF_TURN, lambda call: list(OUT_OF_TURN).index(call) % 3 == 0)
)
def test_a_call_on_one_rank_while_others_step_is_an_error_on_every_rank(
    call: str, buckets: int | None
) -> None:
    outcomes = run_workers(call_on_one_rank, 3, call, buckets)
    told = rf"step 1 of optimizer 0 on ranks 0, 2, but {call}\(\) of optimizer 0 on rank 1; {call}"
    assert_all_raised(outcomes, errors.ConfigMismatchError, told)


def verify_while_others_clip_in_nodes(
    rank: int, world_size: int, scope: str, buckets: int | None
) -> Caught | None:
    optimizer = make_optimizer(
        [(name, torch.nn.Parameter(torch.ones(9000))) for name in "abc"],
        exchange=distlion.AllReduce(),
        nodes=distlion.Nodes(ranks_per_node=2),
        clip_norm=distlion.ClipNorm(1.0, scope=scope),  # type: ignore[arg-type]
        bucket_elements=buckets,
    )
    set_grads(optimizer, 0, rank)
    action = optimizer.verify_replicas if rank == 1 else optimizer.step
    return caught(optimizer, action)


@pytest.mark.parametrize("buckets", [None, 64])
@pytest.mark.parametrize("scope", in_tiers(["worker", "global"], lambda scope: scope == "global"))
def test_a_call_on_one_rank_while_others_clip_in_nodes_is_an_error_on_every_rank(
    scope: str, buckets: int | None
) -> None:
    outcomes = run_workers(verify_while_others_clip_in_nodes, 4, scope, buckets)
    assert_all_raised(outcomes, errors.ConfigMismatchError, "verify_replicas", "rank 1")


def load_other_rules(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer()
    state = optimizer.state_dict()
    if rank == 1:
        state["param_groups"][0]["aggregation"] = repr(distlion.TernaryVote())
    return caught(optimizer, lambda: optimizer.load_state_dict(state))


def test_states_with_different_rules_are_refused_on_every_rank() -> None:
    outcomes = run_workers(load_other_rules, 3)
    assert_all_raised(outcomes, errors.ConfigMismatchError, "TernaryVote", "rank 1")


def change_tensor_lr(rank: int, world_size: int) -> Caught | None:
    optimizer = make_optimizer(lr=torch.tensor(1e-4))
    set_grads(optimizer, 0, rank)
    optimizer.param_groups[0]["lr"] = torch.tensor(1.01e-4 if rank == 1 else 1.02e-4)
    return caught(optimizer, optimizer.step)


def test_tensor_learning_rates_that_print_alike_still_differ() -> None:
    outcomes = run_workers(change_tensor_lr, 3)
    assert_all_raised(outcomes, errors.ConfigMismatchError, "lr of group 0", "rank 1")


def make_partly_frozen() -> tuple[distlion.DistributedLion, torch.nn.Parameter, torch.nn.Parameter]:
    """Return an optimizer, its frozen parameter and its trained one, both (9,)."""
    frozen = torch.nn.Parameter(torch.zeros(9), requires_grad=False)
    trained = torch.nn.Parameter(torch.zeros(9))
    return make_optimizer([("frozen", frozen), ("trained", trained)]), frozen, trained


def unfreeze(rank: int, world_size: int, ranks: tuple[int, ...]) -> Caught | None:
    optimizer, frozen, trained = make_partly_frozen()
    assert "exp_avg" not in optimizer.state[frozen]
    frozen.requires_grad_(rank in ranks)
    trained.grad = torch.ones(9)
    return caught(None, optimizer.step)


def test_a_parameter_unfrozen_on_one_rank_is_an_error_on_every_rank() -> None:
    for found in run_workers(unfreeze, 3, (1,)):
        assert_raised(found, errors.ConfigMismatchError, "no longer frozen: frozen", "rank 1")


def test_a_parameter_unfrozen_on_all_ranks_is_refused_by_name() -> None:
    for found in run_workers(unfreeze, 2, (0, 1)):
        assert_raised(found, errors.StepInputError, "frozen was frozen")


def add_beside_unfrozen(
    rank: int, world_size: int, ranks: tuple[int, ...]
) -> tuple[Caught | None, int]:
    optimizer, frozen, trained = make_partly_frozen()
    frozen.requires_grad_(rank in ranks)
    group = {"params": [("added", torch.nn.Parameter(torch.zeros(2)))]}
    found = caught(None, lambda: optimizer.add_param_group(group))
    if len(ranks) == world_size:  # nobody is dead: the next step is one of all
        frozen.requires_grad_(False)
        trained.grad = torch.ones(9)
        optimizer.step()
    return found, optimizer.committed_step


def test_a_group_added_beside_a_parameter_unfrozen_on_one_rank_is_an_error_on_every_rank() -> None:
    for found, _ in run_workers(add_beside_unfrozen, 3, (1,)):
        assert_raised(found, errors.ConfigMismatchError, "frozen", "rank 1")


def test_a_group_added_beside_an_unfrozen_parameter_is_refused_and_nobody_is_dead() -> None:
    for found, steps in run_workers(add_beside_unfrozen, 2, (0, 1)):
        assert_raised(found, errors.InvalidArgumentError, "frozen was frozen")
        assert steps == 1


def load_beside_unfrozen(rank: int, world_size: int, ranks: tuple[int, ...]) -> Caught | None:
    """Load a state that has the momentum which the unfrozen parameter lacks."""
    optimizer, frozen, _ = make_partly_frozen()
    state = optimizer.state_dict()
    state["state"] = {index: {"exp_avg": torch.zeros(9)} for index in range(2)}
    frozen.requires_grad_(rank in ranks)
    return caught(None, lambda: optimizer.load_state_dict(state))


def test_a_state_loaded_beside_a_parameter_unfrozen_on_one_rank_is_an_error_on_every_rank() -> None:
    for found in run_workers(load_beside_unfrozen, 3, (1,)):
        assert_raised(found, errors.ConfigMismatchError, "no longer frozen: frozen", "rank 1")


def test_a_state_loaded_beside_an_unfrozen_parameter_is_refused() -> None:
    for found in run_workers(load_beside_unfrozen, 2, (0, 1)):
        assert_raised(found, errors.InvalidArgumentError, "frozen was frozen")


def step_after_add(rank: int, world_size: int) -> tuple[float, bool]:
    optimizer = make_optimizer()
    added = torch.nn.Parameter(torch.full((5,), float(rank)))
    optimizer.add_param_group({"params": [("added", added)]})
    set_grads(optimizer, 0, rank)
    optimizer.step()
    optimizer.verify_replicas()
    return float(optimizer.committed_step), all(
        bool(torch.isfinite(param).all()) for param in params_of(optimizer)
    )


def test_parameters_added_on_all_ranks_are_broadcast_and_step_along() -> None:
    assert run_workers(step_after_add, 3) == [(1.0, True)] * 3


def overflow_then_go_on(rank: int, world_size: int) -> tuple[str, float]:
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = make_optimizer([("only", param)], betas=(0.9, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    param.grad, exp_avg = torch.full((4,), 1024.0), optimizer.state[param]["exp_avg"]
    exp_avg.fill_(float("inf") if rank == 1 else 0.0)  # no scale would help
    found = caught(None, lambda: scaler.step(optimizer))
    assert found is not None
    exp_avg.zero_()
    param.grad = torch.full((4,), 1.0)
    optimizer.step()
    return found.kind, float(optimizer.state[param]["exp_avg"][0])


def test_an_error_leaves_no_scale_of_a_grad_scaler_behind() -> None:
    for kind, momentum in run_workers(overflow_then_go_on, 2):
        assert kind == "NonFiniteError"
        assert momentum == pytest.approx(0.01)
