"""FSDP2 models of 2 to 8 ranks for tests, and what virtual workers make of the same gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import distlion


def make_mesh(voters: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (voters, shards), mesh_dim_names=("replicate", "shard"))


def build(seed: int = 0) -> nn.Sequential:
    """Dims that no number of shards divides, and starts of shards at odd bits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for module in model:
        if list(module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def make_optimizer(model: nn.Module, mesh: DeviceMesh, **options: Any) -> distlion.DistributedLion:
    settings = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "seed": 7,
        "process_group": mesh["replicate"].get_group(),
        "timeouts": distlion.Timeouts(step_s=20),
        "replicas": distlion.Replicas(check_every=1),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return distlion.DistributedLion(model.named_parameters(), **{**settings, **options})


def run_backward(model: nn.Module, step: int, rank: int) -> None:
    torch.manual_seed(1000 * step + rank)
    model(torch.randn(4, 7)).float().square().mean().backward()


def gather_gradients(model: nn.Module, mesh: DeviceMesh) -> list[list[Tensor]]:
    """Return every worker's whole gradients."""
    group = mesh["replicate"].get_group()
    rows: list[list[Tensor]] = [[] for _ in range(group.size())]
    for param in model.parameters():
        whole = param.grad.full_tensor().contiguous()
        gathered = [torch.empty_like(whole) for _ in rows]
        dist.all_gather(gathered, whole, group=group)
        for worker, row in enumerate(gathered):
            rows[worker].append(row)
    return rows


class Reference:
    """The same training with whole parameters, in this process."""

    def __init__(self, workers: int, seed: int = 0, **options: Any) -> None:
        self.model = build(seed)
        settings = {"lr": 1e-2, "weight_decay": 0.1, "seed": 7, **options}
        self.cluster = distlion.VirtualCluster(
            self.model.named_parameters(), workers=workers, **settings
        )

    def step(self, rows: list[list[Tensor]]) -> None:
        for worker, row in enumerate(rows):
            for param, grad in zip(self.model.parameters(), row, strict=True):
                param.grad = grad.clone()
            self.cluster.collect(worker)
        self.cluster.step()

    def equals(self, model: nn.Module) -> bool:
        return all(
            torch.equal(mine.full_tensor(), own.data)
            for mine, own in zip(model.parameters(), self.model.parameters(), strict=True)
        )


def digest(model: nn.Module) -> list[bytes]:
    return [param.to_local().detach().numpy().tobytes() for param in model.parameters()]


def save(model: nn.Module, optimizer: Any, path: str) -> None:
    state = get_optimizer_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optim": state, "model": model.state_dict()}, checkpoint_id=path)


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    state, weights = get_optimizer_state_dict(model, optimizer), model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"optim": state, "model": weights}, checkpoint_id=path)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, state)
