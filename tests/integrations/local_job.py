"""Jobs with local steps: the exam's, whose optimizer votes every few steps of AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import distlion
from integrations.job import LR, WEIGHT_DECAY, DigitsModel, Job

EVERY = 3
OPTIONS: dict[str, Any] = {"every": EVERY, "timeouts": distlion.Timeouts(init_s=60, step_s=20)}


@dataclass(frozen=True)
class LocalJob(Job):
    """One run whose workers take local steps; they vote before a save, an evaluation, the end."""

    def make_optimizer(self, params: Any) -> distlion.LocalSteps:
        """Make what takes local steps over parameters or groups."""
        inner = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
        return distlion.LocalSteps(inner, **OPTIONS)


@dataclass(frozen=True)
class Ended:
    """What a rank hands back.

    Attributes:
        params: The model's, after the run.
        moments: AdamW's first moments, this worker's own.
        votes: Votes committed.
        steps: Local steps.
        losses: Of each of this rank's training batches.
    """

    params: list[Tensor]
    moments: list[Tensor]
    votes: int
    steps: int
    losses: list[float]

    @classmethod
    def of(cls, model: DigitsModel, optimizer: distlion.LocalSteps) -> Ended:
        """Read what there is to compare."""
        params = [param.detach().clone() for param in model.parameters()]
        moments = [optimizer.state[param]["exp_avg"].clone() for param in model.parameters()]
        votes, steps = optimizer.committed_step, optimizer.local_step
        return cls(params, moments, votes, steps, list(model.losses))


def train_plainly(job: LocalJob, rank: int) -> Ended:
    """Do what the job says without a framework."""
    model = job.make_model(rank)
    optimizer = job.make_optimizer(model.parameters())
    scheduler = job.make_scheduler(optimizer)
    for step, batch in enumerate(job.batches(rank), start=1):
        model(**batch)["loss"].backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        is_evaluated = job.evaluation is not None and step % job.evaluation == 0
        if step == job.save_at or is_evaluated:
            optimizer.vote()
    optimizer.vote()
    return Ended.of(model, optimizer)


def train_under(framework: str, job: LocalJob, rank: int) -> Ended:
    """Do what the job says under a framework."""
    return _TRAIN[framework](job, rank)


def _train_by_trainer(job: LocalJob, rank: int) -> Ended:
    from transformers import Trainer, TrainingArguments

    from distlion.integrations.transformers import VotingMixin
    from integrations.with_trainer import find_checkpoint, make_arguments

    class VotingTrainer(VotingMixin, Trainer): ...

    trainer = VotingTrainer(
        job.make_model(rank),
        TrainingArguments(**make_arguments(job)),
        train_dataset=job.dataset(deal="batches"),
        eval_dataset=job.validation(),
        optimizer_cls_and_kwargs=(
            distlion.LocalSteps,
            {"inner": torch.optim.AdamW, **OPTIONS},
        ),
    )
    trainer.train(resume_from_checkpoint=find_checkpoint(job))
    return Ended.of(trainer.model, trainer.voter)


def _train_by_accelerate(job: LocalJob, rank: int) -> Ended:
    from accelerate.state import AcceleratorState, GradientState
    from torch.utils.data import DataLoader

    from distlion.integrations.accelerate import VotingAccelerator
    from integrations.job import BATCH

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = VotingAccelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = job.make_model(rank)
    own = job.make_optimizer(model.parameters())
    scheduler = job.make_scheduler(own)
    loader = DataLoader(job.dataset(deal="batches"), batch_size=BATCH)
    model, optimizer, scheduler, loader = accelerator.prepare(model, own, scheduler, loader)
    step, batches = 0, loader
    if job.resume is not None:
        accelerator.load_state(f"{job.resume}/state")
        step = own.local_step
        batches = accelerator.skip_first_batches(loader, step)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if job.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step == job.save_at:
            accelerator.save_state(f"{job.folder}/state")
        if job.evaluation is not None and step % job.evaluation == 0:
            accelerator.vote()
    accelerator.vote()
    return Ended.of(accelerator.unwrap_model(model), own)


def _train_by_fabric(job: LocalJob, rank: int) -> Ended:
    import lightning
    from torch.utils.data import DataLoader

    from distlion.integrations.fabric import VotingStrategy
    from integrations.job import BATCH

    fabric = lightning.Fabric(accelerator="cpu", devices=job.world_size, strategy=VotingStrategy())
    fabric.launch()
    bare = job.make_model(rank)
    own = job.make_optimizer(bare.parameters())
    scheduler = job.make_scheduler(own)
    model, optimizer = fabric.setup(bare, own)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state["step"] = 0
    if job.resume is not None:
        fabric.load(f"{job.resume}/state.ckpt", state)
    data = job.dataset(deal="examples", first_step=state["step"])
    for batch in fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH)):
        fabric.backward(model(**batch)["loss"])
        if job.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] == job.save_at:
            fabric.save(f"{job.folder}/state.ckpt", state)
        if job.evaluation is not None and state["step"] % job.evaluation == 0:
            own.vote()
    own.vote()
    return Ended.of(bare, own)


def _train_by_lightning(job: LocalJob, rank: int) -> Ended:
    from integrations.with_lightning import Module, fit

    class LocalModule(Module):
        def make_optimizer(self) -> Any:
            return job.make_optimizer(self.parameters())

    module = LocalModule(job, rank)
    fit(module, job)
    return Ended.of(module.net, module.voter)


_TRAIN = {
    "Trainer": _train_by_trainer,
    "Accelerate": _train_by_accelerate,
    "Fabric": _train_by_fabric,
    "Lightning": _train_by_lightning,
}
FRAMEWORKS = tuple(_TRAIN)
