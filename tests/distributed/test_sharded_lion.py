"""Lion, one worker's own optimizer, on FSDP2 models: bits, and states of torch's own formats."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distlion
from cluster import run_workers
from distlion.errors import CheckpointError
from distributed.sharded_models import build, digest, load, make_mesh, run_backward, save, shard

pytestmark = pytest.mark.distributed

N_RANKS, AT, STEPS = 4, 2, 4
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


def load_states_by_hand(rank: int, world_size: int) -> dict[str, Any]:
    model, optimizer = make("all shards")
    rows = train(model, optimizer, 0, AT)
    state = optimizer.state_dict()
    others, other_optimizer = make("all shards", seed=1)
    other_optimizer.load_state_dict(repeat_whole(rows)[1].state_dict())
    found: dict[str, Any] = {
        "plain": are_equal(list_momenta(model, optimizer), list_momenta(others, other_optimizer))
    }
    before = [each.clone() for each in list_momenta(model, optimizer)]
    last = max(state["state"])
    momentum = state["state"][last]["exp_avg"]
    shard = momentum.to_local().unsqueeze(0)
    of_workers = DTensor.from_local(
        shard, momentum.device_mesh, [Shard(1)], shape=torch.Size([1, 3]), stride=(3, 1)
    )
    refused = {
        "resharded": momentum.redistribute(placements=[Replicate()]),
        "of workers": of_workers,
        "small": torch.zeros(2),
    }
    groups = [{**state["param_groups"][0], "lr": 0.5}]
    for name, odd in refused.items():
        entries = {**state["state"], last: {"exp_avg": odd}}
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict({"state": entries, "param_groups": groups})
        found[name] = str(caught.value)
    found["unchanged"] = are_equal(before, list_momenta(model, optimizer))
    found["rate"] = optimizer.param_groups[0]["lr"]
    return found


def test_a_plain_state_is_cut_and_others_are_refused() -> None:
    for found in run_workers(load_states_by_hand, N_RANKS):
        assert found["plain"]
        assert "momentum of parameter 5 of group 0" in found["resharded"]
        assert "full_tensor()" in found["resharded"]
        assert "saved momentum has shape (1, 3), the parameter has (3,)" in found["of workers"]
        assert "saved momentum has shape (2,)" in found["small"]
        assert found["unchanged"]
        assert found["rate"] == 1e-2


def load_shards_into_whole_parameters(rank: int, world_size: int) -> list[str]:
    model, optimizer = make("all shards")
    train(model, optimizer, 0, AT)
    state = optimizer.state_dict()
    names, found = list(build().named_parameters()), []
    for other in (
        distlion.Lion(names, lr=0.5),
        distlion.DistributedLion(names, lr=0.5, replicas=distlion.Replicas(check_every=None)),
        distlion.VirtualCluster(names, lr=0.5, workers=2),
    ):
        with pytest.raises(CheckpointError) as caught:
            other.load_state_dict(state)
        assert other.param_groups[0]["lr"] == 0.5
        assert not any(entry["exp_avg"].any() for entry in other.state.values())
        found.append(str(caught.value))
    return found


def test_shards_are_refused_by_whole_parameters() -> None:
    for found in run_workers(load_shards_into_whole_parameters, N_RANKS):
        assert len(found) == 3
        assert all("the parameter is a whole tensor" in text for text in found)


def copy_and_go_on(rank: int, world_size: int) -> bool:
    model, optimizer = make("all shards")
    train(model, optimizer, 0, AT)
    copied = copy.deepcopy(optimizer)  # with parameters of its own
    run_backward(model, AT, rank=0)
    pairs = list(
        zip(optimizer.param_groups[0]["params"], copied.param_groups[0]["params"], strict=True)
    )
    for param, its_copy in pairs:
        its_copy.grad = param.grad.detach().clone()
    optimizer.step()
    copied.step()
    mine, its = (each.state_dict()["state"] for each in (optimizer, copied))
    momenta = [(mine[key]["exp_avg"], its[key]["exp_avg"]) for key in mine]
    return all(are_equal([one], [other]) for one, other in [*pairs, *momenta])


def test_a_copy_goes_on_to_the_same_bits() -> None:
    assert run_workers(copy_and_go_on, N_RANKS) == [True] * N_RANKS


def save_through_hooks(rank: int, world_size: int) -> list[bool]:
    found = []
    sharded = make("all shards")[1]
    whole = make_lion(build())
    for each, is_sharded in ((sharded, True), (whole, False)):
        seen: list[bool] = []

        def wrap(_: Any, state: dict[str, Any], seen: list[bool] = seen) -> dict[str, Any]:
            seen += [isinstance(entry["exp_avg"], DTensor) for entry in state["state"].values()]
            return {"opt": state}

        each.register_state_dict_post_hook(wrap)
        found.append(list(each.state_dict()) == ["opt"] and seen == [is_sharded] * 6)
        found.append(not any(isinstance(kept["exp_avg"], DTensor) for kept in each.state.values()))
    return found


def test_hooks_of_saving_see_the_saved_form() -> None:
    assert run_workers(save_through_hooks, N_RANKS) == [[True] * 4] * N_RANKS


class Mlp(nn.Module):
    """A block with columns and rows to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 16), nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def train_beside_tensor_parallelism(rank: int, world_size: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))

    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Mlp()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["shard"])

    model = make_model(0)
    optimizer = make_lion(model)
    torch.manual_seed(0)
    whole = Mlp()
    whole_optimizer = make_lion(whole)
    for grads in train(model, optimizer, 0, AT):
        for param, grad in zip(whole.parameters(), grads, strict=True):
            param.grad = grad
        whole_optimizer.step()
    others = make_model(1)
    other_optimizer = make_lion(others)
    other_optimizer.load_state_dict(whole_optimizer.state_dict())
    return are_equal(model.parameters(), whole.parameters()) and are_equal(
        list_momenta(model, optimizer), list_momenta(others, other_optimizer)
    )


@pytest.mark.slow
def test_columns_and_rows_of_tensor_parallelism() -> None:
    assert run_workers(train_beside_tensor_parallelism, N_RANKS) == [True] * N_RANKS
