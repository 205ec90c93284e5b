"""Workers with local steps that differ: all raise the same, and none is waited for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import distlion
from checkpoint.runs import make_model
from cluster import run_workers
from distlion import errors
from drawn import make_params, set_grads
from failures import Caught, assert_raised
from local_runs import (
    EVERY,
    SHAPES,
    WRITES,
    add_to_inner,
    are_equal,
    catch,
    copies,
    freeze,
    load_weights,
    make,
    make_lion,
    train,
)

pytestmark = pytest.mark.distributed

N_WORKERS = 2


def change_behind(
    rank: int, world_size: int, change: Callable[..., None]
) -> tuple[list[Caught | None], bool]:
    """Rank 1 alone changes something."""
    params = make_params(SHAPES)
    optimizer = make(params)
    before = copies(optimizer.common_point)
    if rank == 1:
        change(optimizer, params)
    found = [
        catch(lambda n=n: train(optimizer, params.values(), rank, 0, n)) for n in (EVERY, EVERY)
    ]
    return found, are_equal(optimizer.common_point, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (load_weights, "rank 1 cannot vote: parameter 1 of group 0, shape .5,. was written to"),
        (add_to_inner, "rank 1 cannot vote: a parameter of shape .3,. is in the inner"),
        (freeze, "rank 1 cannot vote: parameter 1 of group 0, shape .5,. was trained"),
    ],
)
def test_what_one_worker_changed_behind_the_optimizers_back_stops_all(
    change: Any, words: str
) -> None:
    for found, unchanged in run_workers(change_behind, N_WORKERS, change):
        for each in found:
            assert_raised(each, errors.StepInputError, words)
        assert unchanged


def write_after_a_vote(rank: int, world_size: int) -> list[tuple[Caught | None, bool]]:
    """Rank 1 writes to a parameter, in ways that torch does not count as writes."""
    found = []
    for write in WRITES:
        params = make_params(SHAPES)
        optimizer = make(params)
        train(optimizer, params.values(), rank, 0, EVERY)
        before = copies(optimizer.common_point)
        if rank == 1:
            write(optimizer, params)
        caught = catch(lambda: train(optimizer, params.values(), rank, EVERY, 2 * EVERY))  # noqa: B023
        found.append((caught, are_equal(optimizer.common_point, before)))
    return found


def test_writes_that_torch_does_not_count_stop_all_at_the_next_vote() -> None:
    words = "rank 1 cannot vote: parameter 1 of group 0, shape .5,. was written to"
    for rows in run_workers(write_after_a_vote, N_WORKERS):
        for found, unchanged in rows:
            assert_raised(found, errors.StepInputError, words)
            assert unchanged


def add_bad_group(rank: int, world_size: int) -> tuple[Caught | None, Any, list[torch.Tensor]]:
    params = make_params(SHAPES)
    optimizer = make(params, make_lion)
    params["more"] = nn.Parameter(torch.ones(130))
    lr = -1.0 if rank == 1 else 1e-3
    group = {"params": [params["more"]], "lr": lr}
    found = catch(lambda: optimizer.add_param_group(group))
    counts = [
        len(each.param_groups) for each in (optimizer, optimizer.inner, optimizer.outer_optimizer)
    ]
    counts += [len(optimizer.common_point), len(optimizer.state)]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [params["more"]], "lr": 1e-3})
    train(optimizer, params.values(), rank, 0, EVERY)
    return found, counts, copies(optimizer.common_point)


def test_a_group_that_one_inner_optimizer_refuses_is_added_on_none() -> None:
    ended = run_workers(add_bad_group, N_WORKERS)
    for found, counts, common in ended:
        assert_raised(found, errors.InvalidArgumentError, "lr=-1.0: expected a finite number")
        assert counts == [1, 1, 1, len(SHAPES), len(SHAPES)]
        assert are_equal(common, ended[0][2])
    assert_raised(ended[0][0], errors.InvalidArgumentError, "refused on rank 1, and nothing")


def load_other_place(rank: int, world_size: int, kind: str) -> tuple[Caught | None, int, bool]:
    """Load states of different steps, or of different kinds."""
    params = make_params(SHAPES)
    optimizer = make(params)
    train(optimizer, params.values(), rank, 0, EVERY + 1)
    first, inner_state = copy.deepcopy((optimizer.state_dict(), optimizer.inner.state_dict()))
    train(optimizer, params.values(), rank, EVERY + 1, EVERY + 2)
    second = copy.deepcopy(optimizer.state_dict())
    if kind == "inner alone":
        first = inner_state
    elif kind == "lost":
        first.pop("local_steps")
    elif kind == "parts":
        first["local_steps"]["parts"] = 2
    elif kind == "late":
        first["local_steps"]["late_part"] = 0
    kept = optimizer.state
    found = catch(lambda: optimizer.load_state_dict(first if rank == 1 else second))
    step = optimizer.local_step
    train(optimizer, params.values(), rank, EVERY + 2, 2 * EVERY + 2)
    optimizer.verify_replicas()
    return found, step, optimizer.state is kept


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("step", "4 steps, 1 of them since the last vote on rank 1"),
        ("inner alone", "a state without local steps on rank 1"),
        ("lost", "refused on rank 1, .* lost its key 'local_steps'"),
        ("parts", "was saved with parts=2, .* no longer has parts= and delay="),
        ("late", "a vote with delay= was under way"),
    ],
)
def test_states_of_different_steps_are_loaded_on_none(kind: str, words: str) -> None:
    for found, step, is_kept in run_workers(load_other_place, N_WORKERS, kind):
        assert_raised(found, errors.CheckpointError, "nothing was changed anywhere", words)
        assert step == EVERY + 2
        assert is_kept


def load_what_is_not_ours(rank: int, world_size: int) -> tuple[list[Caught | None], int, bool]:
    """Load a state that torch's function has cut down, and one of the other worker."""
    model = nn.Linear(7, 3)
    optimizer = distlion.LocalSteps(torch.optim.AdamW(model.named_parameters()), every=EVERY)
    set_grads(model.parameters(), 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    states = [optimizer.state_dict() for _ in range(world_size)]
    dist.all_gather_object(states, optimizer.state_dict())
    kept = optimizer.state
    lost = get_optimizer_state_dict(model, optimizer)
    found = [
        catch(lambda: set_optimizer_state_dict(model, optimizer, lost)),
        catch(lambda: optimizer.load_state_dict(states[1 - rank])),
    ]
    is_kept = optimizer.state is kept
    optimizer.load_state_dict(states[rank])
    optimizer.load_state_dict(optimizer.inner.state_dict())
    return found, optimizer.local_step, is_kept


def test_a_state_that_has_lost_a_part_or_is_another_workers_is_refused() -> None:
    for found, step, is_kept in run_workers(load_what_is_not_ours, N_WORKERS):
        lost, others = found
        words = "has lost its key 'local_steps'", "Save with distlion.save_checkpoint"
        assert_raised(lost, errors.CheckpointError, *words)
        assert_raised(others, errors.CheckpointError, "these are the momenta of worker")
        assert (step, is_kept) == (1, True)


def load_with_hooks(rank: int, world_size: int, name: str) -> list[Caught | None]:
    """On rank 1 a hook raises, then the state is no state, then all is well."""
    params = list(make_params(SHAPES).values())
    optimizer: Any = (
        distlion.DistributedLion(params) if name == "lion" else make(make_params(SHAPES))
    )

    def refuse(own: Any, state: Any) -> None:
        raise KeyError("wrapped")

    state = optimizer.state_dict()
    handle = optimizer.register_load_state_dict_pre_hook(refuse if rank == 1 else lambda *_: None)
    found = [catch(lambda: optimizer.load_state_dict(state))]
    handle.remove()
    found.append(catch(lambda: optimizer.load_state_dict([] if rank == 1 else state)))
    optimizer.load_state_dict(state)
    return found


@pytest.mark.parametrize("name", ["lion", "local"])
def test_a_hook_before_loading_that_raises_on_one_rank_is_heard_by_all(name: str) -> None:
    for refused, malformed in run_workers(load_with_hooks, N_WORKERS, name):
        assert_raised(refused, errors.CheckpointError, "a pre-hook .* raised KeyError: 'wrapped'")
        assert_raised(malformed, errors.CheckpointError, "rank 1")


def vote_a_call_apart(rank: int, world_size: int, at: int) -> tuple[Caught | None, int]:
    """Rank 1 has left out a step, and both vote out of turn at the end."""
    params = make_params(SHAPES)
    optimizer = make(params)
    train(optimizer, params.values(), rank, 0, at - rank)
    found = catch(optimizer.vote)
    return found, optimizer.committed_step


@pytest.mark.parametrize("at", [2, EVERY])
def test_workers_that_are_a_call_apart_are_told_at_the_next_vote(at: int) -> None:
    ended = run_workers(vote_a_call_apart, N_WORKERS, at, outcomes=True)
    if at == EVERY:  # rank 0 is within its regular vote, which step() raises
        assert isinstance(ended[0], errors.ConfigMismatchError)
        ended = ended[1:]
    for found, votes in ended:
        caught = assert_raised(found, errors.ConfigMismatchError, "calls of step.. so far: ")
        assert f"so far: {at} on rank 0" in caught.text
        assert f"so far: {at - 1} on rank 1" in caught.text
        assert votes == 0


def vote_twice(rank: int, world_size: int) -> tuple[Any, ...]:
    params = make_params(SHAPES)
    optimizer = make(params, aggregation=distlion.ResidualVote())
    train(optimizer, params.values(), rank, 0, EVERY)
    first = copies(optimizer.common_point)
    optimizer.vote()
    assert are_equal(optimizer.common_point, first)
    assert are_equal(params.values(), first)
    if rank == 1:
        set_grads(params.values(), rank, EVERY)
        optimizer.step()
    return optimizer.committed_step, catch(optimizer.vote)


def test_a_vote_without_a_step_since_the_last_moves_nothing() -> None:
    for votes, found in run_workers(vote_twice, N_WORKERS):
        assert votes == 1
        assert_raised(found, errors.ConfigMismatchError, "vote.. must be called by every rank")


def save_apart(rank: int, world_size: int, folder: str) -> Caught | None:
    model = make_model()
    optimizer = distlion.LocalSteps(torch.optim.SGD(model.parameters(), lr=1e-2), every=EVERY)
    for _ in range(2 - rank):
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
    return catch(lambda: distlion.save_checkpoint(folder, model, optimizer))


def test_workers_that_are_a_call_apart_save_no_checkpoint(tmp_path: Path) -> None:
    for found in run_workers(save_apart, N_WORKERS, str(tmp_path)):
        assert_raised(found, errors.CheckpointError, "local steps differ from rank 0's")
