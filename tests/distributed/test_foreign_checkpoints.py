"""Formats that keep one copy of what they take for replicated: momenta must not be lost in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import torch

import distlion
from cluster import run_workers
from distlion import errors

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Caught = tuple[str, str, int]


def build() -> tuple[torch.nn.Module, distlion.DistributedLion]:
    torch.manual_seed(0)
    model = torch.nn.Linear(9, 7)
    return model, distlion.DistributedLion(model.named_parameters(), lr=1e-2)


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in optimizer.state.values()]


def catch(call: Any) -> tuple[str, str]:
    try:
        call()
    except errors.DistlionError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def save_by_dcp(
    rank: int, world_size: int, folder: str, flatten: bool
) -> tuple[tuple[str, str], bool, int]:
    """Save through files with torch.distributed.checkpoint, load into another optimizer, go on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    warnings.simplefilter("ignore")
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build()
    take_step(model, optimizer, seed=rank)
    state = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=folder)
    again, other = build()
    loaded = {"optim": get_optimizer_state_dict(again, other, options=options)}
    dcp.load(loaded, checkpoint_id=folder)
    before = momenta(other)
    found = catch(lambda: set_optimizer_state_dict(again, other, loaded["optim"], options=options))
    unchanged = all(map(torch.equal, before, momenta(other)))
    take_step(again, other, seed=rank)
    return found, unchanged, other.committed_step


@pytest.mark.parametrize("flatten", [False, True])
def test_momenta_that_dcp_took_for_replicas_are_refused_on_every_rank(
    tmp_path: Path, flatten: bool
) -> None:
    for found, unchanged, steps in run_workers(save_by_dcp, 2, str(tmp_path / "dcp"), flatten):
        kind, text = found
        assert kind == errors.CheckpointError.__name__, text
        assert "refused on rank" in text and "save_checkpoint" in text, text
        assert unchanged and steps == 1


def hand_over(rank: int, world_size: int, flatten: bool) -> tuple[int, bool]:
    """Hand a state to another optimizer through torch's functions, without a file between."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build()
    take_step(model, optimizer, seed=rank)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    again, other = build()
    before = [param.detach().clone() for param in again.parameters()]
    set_optimizer_state_dict(again, other, state, options=options)
    # torch runs a step where an optimizer has no state yet; ours has, from the constructor on.
    is_untouched = all(map(torch.equal, before, again.parameters()))
    same = all(map(torch.equal, momenta(optimizer), momenta(other)))
    return other.committed_step, is_untouched and same


@pytest.mark.parametrize("flatten", [False, True])
def test_torch_hands_each_worker_its_own_state(flatten: bool) -> None:
    assert run_workers(hand_over, 2, flatten) == [(1, True)] * 2


def exchange_states(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Load what another worker saved, then what this one did."""
    model, optimizer = build()
    take_step(model, optimizer, seed=rank)
    own = optimizer.state_dict()
    torch.save(own, f"state-{rank}.pt")
    torch.distributed.barrier()
    first = torch.load("state-0.pt", weights_only=True)
    return [
        catch(lambda: optimizer.load_state_dict(first)),
        catch(lambda: optimizer.load_state_dict(own)),
        catch(lambda: take_step(model, optimizer, seed=rank)),
    ]


def test_the_state_of_another_worker_is_refused_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for foreign, own, step in run_workers(exchange_states, 3):
        kind, text = foreign
        assert kind == errors.CheckpointError.__name__, text
        assert "ranks 1, 2" in text and "0 of 3" in text, text
        assert own == step == ("nothing", "")


def load_alone(path: Path, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(torch.load(path, weights_only=True))


def save_state(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    model, optimizer = build()
    take_step(model, optimizer, seed=rank)
    if rank == 0:
        torch.save(optimizer.state_dict(), f"{folder}/state.pt")
    return momenta(optimizer)


def test_the_state_of_one_of_many_loads_as_that_of_a_lion_but_not_as_that_of_one_worker(
    tmp_path: Path,
) -> None:
    expected = run_workers(save_state, 2, str(tmp_path))[0]
    params = list(torch.nn.Linear(9, 7).parameters())
    lion = distlion.Lion(params)
    load_alone(tmp_path / "state.pt", lion)
    assert all(map(torch.equal, momenta(lion), expected))
    other = lion_pytorch.Lion(torch.nn.Linear(9, 7).parameters())
    load_alone(tmp_path / "state.pt", other)
    assert all(map(torch.equal, momenta(other), expected))
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.step()
    # What a Lion saves is no worker's any more.
    alone = distlion.DistributedLion(params)
    alone.load_state_dict(lion.state_dict())
    for optimizer in (distlion.DistributedLion(params), distlion.VirtualCluster(params, workers=2)):
        with pytest.raises(errors.CheckpointError, match="worker 0 of 2") as caught:
            load_alone(tmp_path / "state.pt", optimizer)
        assert "on_world_change" in str(caught.value)
