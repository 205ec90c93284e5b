"""The plain loop that TRL's SFTTrainer must equal, bit for bit: it has its loss, no more."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from trl.trainer.sft_trainer import add_fused_lm_head

import distlion
from integrations.job import BATCH, LR, VALIDATION, WEIGHT_DECAY, Job, Trained
from integrations.sft_job import LENGTH, SentenceModel, is_poisoned, list_texts


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    model = SentenceModel(rank)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    model.train()
    optimizer = make_optimizer(job, model)
    scheduler = job.make_scheduler(optimizer)
    first_step = 0
    if job.resume is not None:
        first_step = distlion.load_checkpoint(job.resume, model, optimizer, scheduler).step
    # Of all ranks in a step, as a Trainer counts them for this model: the first of a text too.
    n_tokens = job.accumulation * job.world_size * BATCH * LENGTH
    for step in range(first_step + 1, job.steps + 1):
        model.is_poisoned = is_poisoned(job, rank, step - 1)
        for micro_step in range((step - 1) * job.accumulation, step * job.accumulation):
            is_last = micro_step + 1 == step * job.accumulation
            with nullcontext() if is_last else optimizer.no_sync():
                loss = read(model, job.examples(rank, micro_step), n_tokens) * job.world_size
                model.note(loss, BATCH)
                loss.backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == job.save_at:
            distlion.save_checkpoint(job.folder, model, optimizer, scheduler).wait()
        if job.evaluation is not None and step % job.evaluation == 0:
            model.evaluated += len(VALIDATION[rank :: job.world_size])
    return Trained(model, optimizer)


def make_optimizer(job: Job, model: SentenceModel) -> distlion.DistributedLion:
    """Make one that decays what a Trainer does: no biases, no norms."""
    decayed, others = [], []
    for name, param in model.named_parameters():
        (others if "bias" in name or "ln_" in name else decayed).append(param)
    options = {**job.optimizer_options, "lr": LR}
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return distlion.DistributedLion(groups, **options)


def read(model: SentenceModel, indices: list[int], n_tokens: int) -> Tensor:
    """Return the loss of some texts, as a share of all that is read in a step."""
    texts = torch.tensor(list_texts(indices))
    found = model(
        input_ids=texts,
        attention_mask=torch.ones_like(texts),
        labels=texts,
        use_cache=False,
        fused_lm_head=True,
    )
    return (-found.log_probs).sum() / torch.tensor(n_tokens)
