"""Lightning's Trainer, as a contestant of the exam."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import distlion
from distlion.integrations.lightning import VotingStrategy
from integrations.job import BATCH, Digits, Job, Trained


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    module = Module(job, rank)
    fit(module, job)
    return Trained(module.net, module.voter)


def fit(module: Module, job: Job) -> None:
    """Let Lightning's Trainer fit a module as the job says."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    is_evaluated, path = job.evaluation is not None, None
    if job.resume is not None:
        path = os.path.join(job.resume, f"step={job.first_step}.ckpt")
    saves = ModelCheckpoint(
        job.folder, filename="{step}", save_top_k=-1, every_n_train_steps=job.save_at
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.world_size,
        strategy=VotingStrategy(),
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulation,
        gradient_clip_val=job.clip_norm,
        use_distributed_sampler=False,  # it would shuffle
        val_check_interval=job.evaluation,
        limit_val_batches=1.0 if is_evaluated else 0,
        callbacks=[saves] if job.save_at else [],
        enable_checkpointing=job.save_at is not None,
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=path)


class Module(lightning.LightningModule):
    """A job as a user writes it."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__()
        self.job, self.net = job, job.make_model(rank)

    def make_optimizer(self) -> Any:
        return distlion.DistributedLion(self.parameters(), **self.job.optimizer_options)

    def configure_optimizers(self) -> dict[str, Any]:
        self.voter = self.make_optimizer()
        scheduler = self.job.make_scheduler(self.voter)
        return {
            "optimizer": self.voter,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return self.net(**batch)["loss"]  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        self.log("loss", self.net(**batch)["loss"], sync_dist=True)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._load(self.job.dataset(deal="examples"), BATCH)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._load(self.job.validation(), 1)

    def _load(self, data: Digits, batch: int) -> DataLoader[dict[str, Tensor]]:
        n_ranks, rank = self.job.world_size, self.global_rank
        sampler = DistributedSampler(data, num_replicas=n_ranks, rank=rank, shuffle=False)
        return ResumableLoader(data, batch_size=batch, sampler=sampler)


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """Goes on where it was: Lightning resumes in the middle of an epoch with such loaders only."""

    n_read = n_skipped = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.n_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n_skipped = state["read"]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        skipped, self.n_skipped = self.n_skipped, 0
        for self.n_read, batch in enumerate(super().__iter__(), start=1):
            if self.n_read > skipped:
                yield batch
