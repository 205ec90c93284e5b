"""Meshes other than one of all ranks: of some ranks only, and several among the parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distlion
from cluster import run_workers
from distlion.errors import DistlionError
from distlion.integrations.fsdp import disable_all_reduce
from distlion.wire import watch
from distributed.sharded_models import (
    Reference,
    build,
    gather_gradients,
    make_mesh,
    make_optimizer,
    run_backward,
    shard,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

N_RANKS = 4


def train(model: Any, optimizer: Any, mesh: DeviceMesh, rank: int) -> bool:
    """Train two steps, and return whether the bits are those of whole parameters."""
    reference = Reference(2)
    for step in range(2):
        run_backward(model, step, rank)
        reference.step(gather_gradients(model, mesh))
        optimizer.step()
        optimizer.zero_grad()
    return reference.equals(model)


def catch(action: Any) -> tuple[str, str]:
    try:
        action()
    except DistlionError as error:
        return type(error).__name__, str(error)
    return "", ""


def train_on_some_ranks(rank: int, world_size: int) -> tuple[bool, str, tuple[str, str]] | None:
    mesh = DeviceMesh("cpu", torch.tensor([[1, 2], [3, 4]]), mesh_dim_names=("replicate", "shard"))
    if rank == 0:
        return None
    model = shard(build(), mesh["shard"])
    optimizer = make_optimizer(model, mesh)
    is_equal = train(model, optimizer, mesh, rank)
    run_backward(model, 2, rank)
    if rank == 2:
        next(model.parameters()).grad._local_tensor[0, 0] = torch.nan
    text = catch(optimizer.step)[1]

    watch.LONG_S = 0.2
    models = [shard(build(), mesh["shard"]) for _ in range(2)]
    pair = [make_optimizer(each, mesh) for each in models]
    for each in models:
        run_backward(each, 0, rank)
    return is_equal, text, catch(pair[int(rank == 2)].step)


@functools.cache
def trained_on_some_ranks() -> list[tuple[bool, str, tuple[str, str]] | None]:
    return run_workers(train_on_some_ranks, 5)


def test_a_mesh_of_some_ranks_trains_without_the_others():
    assert trained_on_some_ranks()[0] is None
    for is_equal, text, _ in trained_on_some_ranks()[1:]:
        assert is_equal
        # Ranks are numbered among those that train.
        assert "0.weight is not finite on rank 1" in text


def test_two_optimizers_called_in_another_order_on_such_a_mesh_are_one_error_on_all_ranks():
    for *_, (kind, text) in trained_on_some_ranks()[1:]:
        assert kind == "StepMismatchError"
        assert "step 0 of optimizer 1 on ranks 0, 2, 3, but step 0 of optimizer 2 on rank 1" in text


def combine(rank: int, world_size: int) -> dict[str, Any]:
    mesh, found = make_mesh(2, 2), {}
    model = shard(build(), mesh["shard"])
    named = list(model.named_parameters())
    options = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "seed": 7,
        "replicas": distlion.Replicas(check_every=1),
    }
    options["process_group"] = mesh["replicate"].get_group()
    optimizer = distlion.DistributedLion(iter(named[:4]), **options)
    optimizer.add_param_group({"params": iter(named[4:])})
    found["added later"] = train(model, optimizer, mesh, rank)
    row = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()])
    on_both = shard(build(), mesh)
    found["cut over voters"] = catch(
        lambda: make_optimizer(on_both, mesh).add_param_group(
            {"params": [("row", torch.nn.Parameter(row))]}
        )
    )
    plain = [("plain", torch.nn.Parameter(torch.ones(3)))]
    found["plain"] = catch(lambda: optimizer.add_param_group({"params": plain}))

    model = build()
    for module, on in zip(
        (model[0], model[2], model[4]), (mesh, *[mesh["shard"]] * 2), strict=True
    ):
        fully_shard(module, mesh=on)
    disable_all_reduce(model[0])
    found["two"] = catch(lambda: distlion.DistributedLion(model.named_parameters()))
    found["two meshes"] = train(model, make_optimizer(model, mesh), mesh, rank)

    outside = dist.GroupMember.NON_GROUP_MEMBER
    found["outside"] = catch(lambda: make_optimizer(model, mesh, process_group=outside))
    return found


@functools.cache
def combined() -> list[dict[str, Any]]:
    return run_workers(combine, N_RANKS)


@pytest.mark.parametrize("what", ["added later", "two meshes"])
def test_bits_are_those_of_whole_parameters(what):
    assert [found[what] for found in combined()] == [True] * N_RANKS


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("plain", "UnsupportedTypeError", "plain is a plain tensor beside DTensors"),
        ("cut over voters", "InvalidArgumentError", "row is cut over the workers that vote"),
        ("two", "InvalidArgumentError", "more than one mesh"),
        ("outside", "ProcessGroupError", "not a member of process_group="),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(what, kind, text):
    for found in combined():
        assert found[what][0] == kind
        assert text in found[what][1]
