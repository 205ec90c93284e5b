"""Gradients that are cut in another way than their parameters, or that are still on their way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import distlion
from cluster import run_workers
from distlion.errors import DistlionError
from distributed.sharded_models import make_mesh

pytestmark = pytest.mark.distributed

N_RANKS = 4
SHAPE = (6, 4)


def make_param(mesh: DeviceMesh | None) -> nn.Parameter:
    values = torch.ones(SHAPE)
    return nn.Parameter(values if mesh is None else distribute_tensor(values, mesh, [Shard(0)]))


def hold_on_turned_mesh(mesh: DeviceMesh) -> Tensor:
    """Return a gradient on a mesh of the same ranks, which hold each other's shards."""
    turned = DeviceMesh("cpu", mesh.mesh.flip(0), _init_backend=False)
    return DTensor.from_local(torch.ones(3, 4), turned, [Shard(0)], run_check=False)


def reduce_later(mesh: DeviceMesh) -> Tensor:
    """Return a gradient whose shards an asynchronous collective adds up."""
    whole = DTensor.from_local(torch.ones(SHAPE), mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Shard(0)], async_op=True)


def add_later(mesh: DeviceMesh) -> Tensor:
    return collectives.all_reduce(torch.ones(SHAPE), "sum", mesh)


# By name: whether the parameter is sharded, and its gradient.
MISPLACED: dict[str, tuple[bool, Callable[[DeviceMesh], Tensor]]] = {
    "plain": (True, lambda mesh: torch.ones(SHAPE)),
    "sharded": (False, lambda mesh: distribute_tensor(torch.ones(SHAPE), mesh, [Shard(0)])),
    "replicated": (True, lambda mesh: distribute_tensor(torch.ones(SHAPE), mesh, [Replicate()])),
    "turned": (True, hold_on_turned_mesh),
}
LATE: dict[str, tuple[bool, Callable[[DeviceMesh], Tensor]]] = {
    "shards": (True, reduce_later),
    "whole": (False, add_later),
}


def step_with(rank: int, world_size: int) -> dict[tuple[str, str], tuple[str, str, list[float]]]:
    """Return for each gradient the kind and text of the error, and the parameter's values."""
    mesh, found = make_mesh(2, 2), {}
    for name, (is_sharded, make_grad) in {**MISPLACED, **LATE}.items():
        for kind in ("Lion", "DistributedLion"):
            param = make_param(mesh["shard"] if is_sharded else None)
            options: dict[str, Any] = {"lr": 0.5}
            if kind == "DistributedLion":
                options["process_group"] = mesh["replicate"].get_group()
            optimizer = getattr(distlion, kind)([("row", param)], **options)
            error, text = "", ""
            try:
                for _ in range(2):  # the second one knows the parameters
                    param.grad = make_grad(mesh["shard"])
                    optimizer.step()
            except DistlionError as raised:
                error, text = type(raised).__name__, str(raised)
            local = param.to_local() if is_sharded else param
            found[name, kind] = error, text, local.unique().tolist()
    return found


@functools.cache
def stepped() -> list[dict[tuple[str, str], tuple[str, str, list[float]]]]:
    return run_workers(step_with, N_RANKS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "the gradient of row is a plain tensor, and the parameter is a DTensor"),
        ("sharded", "the gradient of row is a DTensor, and the parameter is a plain tensor"),
        ("replicated", "redistribute the gradient before step()"),
        ("turned", "Assign a gradient with the parameter's mesh"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "error"), [("Lion", "UnsupportedTypeError"), ("DistributedLion", "StepInputError")]
)
def test_a_gradient_that_is_cut_in_another_way_is_refused(name, text, kind, error):
    for found in stepped():
        raised, message, values = found[name, kind]
        assert raised == error
        assert text in message
        assert values == [1.0]


@pytest.mark.parametrize("kind", ["Lion", "DistributedLion"])
@pytest.mark.parametrize("name", LATE)
def test_a_gradient_that_is_still_on_its_way_is_awaited(name, kind):
    for found in stepped():
        assert found[name, kind] == ("", "", [0.0])
