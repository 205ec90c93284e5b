"""FSDP2, as a contestant of the exam: workers of as many ranks as there are for each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from torch.nn.utils import clip_grad_norm_

import distlion
from integrations.job import DigitsModel, Job, Trained
from integrations.plain import evaluate

Clip = Callable[[list[Tensor], float], Any]


def make_mesh(job: Job) -> DeviceMesh:
    shape = (job.world_size, dist.get_world_size() // job.world_size)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(model: DigitsModel, mesh: DeviceMesh) -> DigitsModel:
    for layer in (model.inner, model.outer):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    mesh = make_mesh(job)
    model = shard(job.make_model(mesh.get_local_rank("replicate")), mesh["shard"])
    voters = mesh["replicate"].get_group()
    optimizer = distlion.DistributedLion(
        model.named_parameters(), process_group=voters, **job.optimizer_options
    )
    return run(job, mesh, model, optimizer, clip=clip_grad_norm_)


def run(
    job: Job,
    mesh: DeviceMesh,
    model: DigitsModel,
    optimizer: distlion.DistributedLion,
    *,
    clip: Clip,
    added: int = 1,
) -> Trained:
    """Train; all ranks of a worker read its batches, and their mean is what each of them has.

    ``added`` is the number of ranks whose gradients a framework adds instead.
    """
    worker = mesh.get_local_rank("replicate")
    scheduler = job.make_scheduler(optimizer)
    if job.resume is not None:
        load(os.path.join(job.resume, "dcp"), model, optimizer, scheduler)
    done = optimizer.committed_step
    batches = job.batches(worker, first_step=done)
    for step in range(done + 1, job.steps + 1):
        for micro_step in range(1, job.accumulation + 1):
            model.set_requires_gradient_sync(micro_step == job.accumulation)
            (model(**next(batches))["loss"] / (job.accumulation * added)).backward()
        if job.clip_norm is not None:
            clip(list(model.parameters()), job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == job.save_at:
            dcp.save(
                collect(model, optimizer, scheduler), checkpoint_id=os.path.join(job.folder, "dcp")
            )
        if job.evaluation is not None and step % job.evaluation == 0:
            evaluate(job, model, worker)
    return Trained(model, optimizer)


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return what torch's own checkpoints keep."""
    return {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
    }


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    state = collect(model, optimizer, scheduler)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    scheduler.load_state_dict(state["scheduler"])
