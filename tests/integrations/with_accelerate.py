"""Accelerate, as a contestant of the exam."""

from __future__ import annotations

import os

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

import distlion
from distlion.integrations.accelerate import VotingAccelerator
from integrations.job import BATCH, Job, Trained


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    # Accelerate keeps these for the life of a process, which has one run as a rule.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = VotingAccelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulation,
        step_scheduler_with_optimizer=False,
    )
    model = job.make_model(rank)
    optimizer = distlion.DistributedLion(model.parameters(), **job.optimizer_options)
    scheduler = job.make_scheduler(optimizer)
    loader = DataLoader(job.dataset(deal="batches"), batch_size=BATCH)
    validation = DataLoader(job.validation(), batch_size=1)
    model, optimizer, scheduler, loader, validation = accelerator.prepare(
        model, optimizer, scheduler, loader, validation
    )
    step, batches = 0, loader
    if job.resume is not None:
        accelerator.load_state(os.path.join(job.resume, "state"))
        step = optimizer.optimizer.committed_step
        batches = accelerator.skip_first_batches(loader, step * job.accumulation)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if job.clip_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        scheduler.step()
        step += 1
        if step == job.save_at:
            accelerator.save_state(os.path.join(job.folder, "state"))
        if job.evaluation is not None and step % job.evaluation == 0:
            model.eval()
            with torch.no_grad():
                for held_out in validation:
                    model(**held_out)
            model.train()
    return Trained(accelerator.unwrap_model(model), optimizer.optimizer)
