"""A plain loop of the library: what every framework must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_

import distlion
from integrations.job import BATCH, VALIDATION, DigitsModel, Job, Trained


def train(
    job: Job, rank: int, prepare: Callable[[DigitsModel], DigitsModel] = lambda model: model
) -> Trained:
    """Do what the job says; called on every rank."""
    model = prepare(job.make_model(rank))
    optimizer = distlion.DistributedLion(model.parameters(), **job.optimizer_options)
    scheduler = job.make_scheduler(optimizer)
    done = 0
    if job.resume is not None:
        done = distlion.load_checkpoint(job.resume, model, optimizer, scheduler).step
    batches = job.batches(rank, first_step=done)
    for step in range(done + 1, job.steps + 1):
        for micro_step in range(1, job.accumulation + 1):
            is_last = micro_step == job.accumulation
            with nullcontext() if is_last else optimizer.no_sync():
                (model(**next(batches))["loss"] / job.accumulation).backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == job.save_at:
            distlion.save_checkpoint(job.folder, model, optimizer, scheduler).wait()
        if job.evaluation is not None and step % job.evaluation == 0:
            evaluate(job, model, rank)
    return Trained(model, optimizer)


def evaluate(job: Job, model: torch.nn.Module, rank: int) -> None:
    """Evaluate on a worker's share of the examples that are held out."""
    data = job.validation()
    mine = range(rank, len(VALIDATION), job.world_size)
    model.eval()
    with torch.no_grad():
        for first in range(0, len(mine), BATCH):
            items = [data[index] for index in mine[first : first + BATCH]]
            model(**{name: torch.stack([item[name] for item in items]) for name in items[0]})
    model.train()
