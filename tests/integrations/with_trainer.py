"""Hugging Face's Trainer sits the exam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from distlion.integrations.transformers import DistributedLion, VotingMixin
from integrations.job import BATCH, LR, VALIDATION, WEIGHT_DECAY, Job, Trained


class VotingTrainer(VotingMixin, Trainer): ...


def make_arguments(job: Job) -> dict[str, Any]:
    """Return the TrainingArguments of a job."""
    return {
        "output_dir": job.folder,
        "max_steps": job.steps,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": job.accumulation,
        "train_sampling_strategy": "sequential",
        "learning_rate": LR,
        "lr_scheduler_type": "linear",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": job.clip_norm or 0,
        # A share of all that ranks evaluate: otherwise accelerate repeats examples to make them
        # equal, and leaves them out of what it gathers.
        "per_device_eval_batch_size": len(VALIDATION) // job.world_size,
        "eval_strategy": "no" if job.evaluation is None else "steps",
        "eval_steps": job.evaluation,
        "save_strategy": "no" if job.save_at is None else "steps",
        "save_steps": job.save_at or job.steps,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }


def find_checkpoint(job: Job) -> str | None:
    """Return the checkpoint to resume from: the first one, as a Trainer saves at its end too."""
    if job.resume is None:
        return None
    saved = Path(job.resume).glob("checkpoint-*")
    return str(min(saved, key=lambda folder: int(folder.name.split("-")[1])))


def train(job: Job, rank: int) -> Trained:
    """Do what the job says."""
    options = {**job.optimizer_options}
    del options["weight_decay"], options["lr"]  # the Trainer's own
    trainer = VotingTrainer(
        job.make_model(rank),
        TrainingArguments(**make_arguments(job)),
        train_dataset=job.dataset(deal="batches"),
        eval_dataset=job.validation(),
        optimizer_cls_and_kwargs=(DistributedLion, options),
    )
    trainer.train(resume_from_checkpoint=find_checkpoint(job))
    return Trained(trainer.model, trainer.voter)
