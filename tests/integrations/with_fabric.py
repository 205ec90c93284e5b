"""Lightning Fabric, as a contestant of the exam."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

import distlion
from distlion.integrations.fabric import VotingStrategy
from integrations.job import BATCH, Job, Trained


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    fabric = lightning.Fabric(accelerator="cpu", devices=job.world_size, strategy=VotingStrategy())
    fabric.launch()
    bare = job.make_model(rank)
    voter = distlion.DistributedLion(bare.parameters(), **job.optimizer_options)
    scheduler = job.make_scheduler(voter)
    model, optimizer = fabric.setup(bare, voter)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state["step"] = 0
    if job.resume is not None:
        fabric.load(os.path.join(job.resume, "state.ckpt"), state)
        assert state["step"] == job.first_step
    data = job.dataset(deal="examples", first_step=state["step"])
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH))
    for number, batch in enumerate(loader, start=1):
        is_last = number % job.accumulation == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(**batch)["loss"] / job.accumulation)
        if not is_last:
            continue
        if job.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] == job.save_at:
            fabric.save(os.path.join(job.folder, "state.ckpt"), state)
        if job.evaluation is not None and state["step"] % job.evaluation == 0:
            _evaluate(fabric, model, job)
    return Trained(bare, voter)


@torch.no_grad()
def _evaluate(fabric: lightning.Fabric, model: torch.nn.Module, job: Job) -> None:
    model.eval()
    for batch in fabric.setup_dataloaders(DataLoader(job.validation(), batch_size=1)):
        model(**batch)
    model.train()
