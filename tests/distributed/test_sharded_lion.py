"""Lion, one worker's own optimizer, on FSDP2 models: bits, and states of torch's own formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import distlion
from cluster import run_workers
from distlion.errors import CheckpointError
from distributed.sharded_models import build, digest, load, make_mesh, run_backward, save, shard

pytestmark = pytest.mark.distributed

N_RANKS, AT, STEPS = 4, 3, 6
MESHES = {"all shards": (1, 4), "replicas of shards": (2, 2)}


def make(case: str, seed: int = 0) -> tuple[nn.Module, distlion.Lion]:
    mesh = make_mesh(*MESHES[case])
    model = shard(build(seed), mesh["shard"] if case == "all shards" else mesh)
    return model, make_lion(model)


def make_lion(model: nn.Module) -> distlion.Lion:
    return distlion.Lion(model.named_parameters(), lr=1e-2, weight_decay=0.1, cautious=True)


def train(model: nn.Module, optimizer: Any, begin: int, end: int) -> list[list[Tensor]]:
    """Train, and return the whole gradients of each step."""
    rows = []
    for step in range(begin, end):
        run_backward(model, step, rank=0)
        rows.append([gather(param.grad) for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return rows


def gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def repeat_whole(rows: list[list[Tensor]], seed: int = 0) -> tuple[nn.Module, distlion.Lion]:
    """Do the same steps with whole parameters."""
    model = build(seed)
    optimizer = make_lion(model)
    for grads in rows:
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    return model, optimizer


def list_momenta(model: nn.Module, optimizer: distlion.Lion) -> list[Tensor]:
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return [state[name]["exp_avg"] for name, _ in model.named_parameters()]


def are_equal(ones: Any, others: Any) -> bool:
    return all(
        torch.equal(gather(one).detach(), gather(other).detach())
        for one, other in zip(ones, others, strict=True)
    )


def train_and_compare(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for case in MESHES:
        model, optimizer = make(case)
        begun = digest(model)
        whole, whole_optimizer = repeat_whole(train(model, optimizer, 0, STEPS))
        momenta, parameters = list_momenta(model, optimizer), list(model.parameters())
        found[case] = {
            "moved": begun != digest(model),
            "parameters": are_equal(parameters, whole.parameters()),
            "momenta": are_equal(momenta, list_momenta(whole, whole_optimizer)),
            "places": [
                momentum.placements == param.placements and momentum.shape == param.shape
                for momentum, param in zip(momenta, parameters, strict=True)
            ],
        }
    return found


def test_shards_take_the_steps_of_whole_parameters() -> None:
    for found in run_workers(train_and_compare, N_RANKS):
        for case in MESHES:
            assert found[case]["moved"]
            assert found[case]["parameters"]
            assert found[case]["momenta"]
            assert all(found[case]["places"])


def save_and_resume(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    model, optimizer = make("all shards")
    train(model, optimizer, 0, AT)
    save(model, optimizer, folder)
    train(model, optimizer, AT, STEPS)
    found = {}
    for case in MESHES:
        resumed, its_optimizer = make(case, seed=1)
        load(resumed, its_optimizer, folder)
        train(resumed, its_optimizer, AT, STEPS)
        found[case] = are_equal(model.parameters(), resumed.parameters()) and are_equal(
            list_momenta(model, optimizer), list_momenta(resumed, its_optimizer)
        )
    return found


def test_a_saved_state_goes_on_to_the_same_bits_with_other_shards_too(tmp_path: Any) -> None:
    for found in run_workers(save_and_resume, N_RANKS, str(tmp_path / "dcp")):
        assert found == dict.fromkeys(MESHES, True)


def exchange_whole_states(rank: int, world_size: int) -> dict[str, bool]:
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = make("all shards")
    rows = train(model, optimizer, 0, AT)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    whole, whole_optimizer = repeat_whole(rows[:1], seed=1)
    found = {}
    if rank == 0:
        set_optimizer_state_dict(whole, whole_optimizer, full)
        repeated = repeat_whole(rows)
        found["down"] = are_equal(
            list_momenta(whole, whole_optimizer), list_momenta(*repeated)
        ) and not any(isinstance(each, DTensor) for each in list_momenta(whole, whole_optimizer))
    back, its_optimizer = make("replicas of shards", seed=1)
    kept = repeat_whole(rows)
    plain = get_optimizer_state_dict(*kept)
    set_optimizer_state_dict(back, its_optimizer, plain, options=options)
    found["up"] = are_equal(list_momenta(model, optimizer), list_momenta(back, its_optimizer))
    return found


def test_a_whole_state_goes_into_shards_and_comes_out_of_them() -> None:
    found = run_workers(exchange_whole_states, N_RANKS)
    assert [each["up"] for each in found] == [True] * N_RANKS
    assert found[0]["down"]


def load_plain_tensors(rank: int, world_size: int) -> dict[str, Any]:
    model, optimizer = make("all shards")
    rows = train(model, optimizer, 0, AT)
    state = optimizer.state_dict()
    others, other_optimizer = make("all shards", seed=1)
    plain = repeat_whole(rows)[1].state_dict()
    other_optimizer.load_state_dict(plain)
    found: dict[str, Any] = {
        "plain": are_equal(list_momenta(model, optimizer), list_momenta(others, other_optimizer))
    }
    before = [each.clone() for each in list_momenta(model, optimizer)]
    moved = {
        key: {"exp_avg": entry["exp_avg"].redistribute(placements=[Replicate()])}
        for key, entry in state["state"].items()
    }
    small = {key: {"exp_avg": torch.zeros(2)} for key in state["state"]}
    for name, entries in (("moved", moved), ("small", small)):
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict({**state, "state": entries})
        found[name] = str(caught.value)
    found["unchanged"] = are_equal(before, list_momenta(model, optimizer))
    return found


def test_a_plain_state_is_cut_and_one_that_is_cut_otherwise_is_refused() -> None:
    for found in run_workers(load_plain_tensors, N_RANKS):
        assert found["plain"]
        assert "momentum of parameter 0 of group 0" in found["moved"]
        assert "set_optimizer_state_dict" in found["moved"]
        assert "saved momentum has shape (2,)" in found["small"]
        assert found["unchanged"]
