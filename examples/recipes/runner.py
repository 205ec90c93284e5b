"""The common part of the recipes: workers, an optimizer, a schedule, checkpoints and a loop.

A recipe adds a model, its data and its numbers.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import distlion

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Numbers:
    """Hyperparameters of a recipe.

    Attributes:
        steps: Steps of the whole run.
        batch: Examples that a worker reads in one micro-step.
        lr: Highest learning rate of the schedule.
        weight_decay: Weight decay of all parameters.
        accumulation: Micro-steps in a step.
        warmup_steps: Steps from 0 to ``lr``; a half cosine down to 0 follows.
        clip: Largest norm of a worker's own gradient; 0 for none.
    """

    steps: int
    batch: int
    lr: float
    weight_decay: float
    accumulation: int = 1
    warmup_steps: int = 0
    clip: float = 0.0

    def lr_factor(self, step: int) -> float:
        """Return the schedule's factor of lr."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        rest = max(1, self.steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / rest)))

    def changed_by(self, args: argparse.Namespace) -> "Numbers":
        """Return these numbers with the changes from the options of ``add_options``."""
        names = ("steps", "batch", "lr", "weight_decay")
        given = {name: getattr(args, name) for name in names}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


class Workers:
    """This process among all workers that torchrun has started."""

    def __init__(self) -> None:
        if "RANK" not in os.environ:
            raise SystemExit("start this with torchrun: torchrun --nproc-per-node 2 RECIPE --tiny")
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else "cpu"
        dist.init_process_group("cuda:nccl,cpu:gloo" if on_gpu else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def add(self, *values: float) -> list[float]:
        """Return the sums over all workers."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def say(self, text: str) -> None:
        """Print on the first worker."""
        if self.rank == 0:
            print(text, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all recipes have."""
    parser.add_argument("--tiny", action="store_true", help="a small model on embedded data")
    parser.add_argument("--steps", type=int, help="replaces the recipe's number of steps")
    parser.add_argument("--batch", type=int, help="replaces the recipe's batch of a worker")
    parser.add_argument("--lr", type=float, help="replaces the recipe's learning rate")
    parser.add_argument("--weight-decay", type=float, help="replaces the recipe's weight decay")
    parser.add_argument("--folder", type=Path, default=Path("runs/recipe"), help="checkpoints")
    parser.add_argument("--save-every", type=int, default=1000, help="in steps; 0 for never")
    parser.add_argument("--eval-every", type=int, default=1000, help="in steps")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")


def train(
    args: argparse.Namespace,
    workers: Workers,
    model: nn.Module,
    numbers: Numbers,
    *,
    batches: Callable[[int], Iterator[Batch]],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    evaluate: Callable[[nn.Module], str],
) -> None:
    """Train, save checkpoints, and print the progress.

    Args:
        args: Options from ``add_options``.
        workers: This worker and all others.
        model: The model; the first worker's values are copied to all others.
        numbers: Hyperparameters.
        batches: Yields a worker's batches from a step on, one for each micro-step.
        loss_of: Computes the mean loss of a batch.
        evaluate: Called on all workers; returns the text to print.
    """
    model = model.to(workers.device)
    optimizer = distlion.DistributedLion(  # no DistributedDataParallel: gradients stay here
        model.parameters(), numbers.lr, (0.9, 0.99), weight_decay=numbers.weight_decay
    )  # the papers' betas
    scheduler = LambdaLR(optimizer, numbers.lr_factor)
    done = 0
    if args.resume:
        done = distlion.load_checkpoint(args.folder, model, optimizer, scheduler).step
        workers.say(f"goes on after step {done}")
    mine, started_s = batches(done), time.monotonic()
    for step in range(done + 1, numbers.steps + 1):
        # Dropout, crops and mixtures depend on the step alone, also in a resumed run.
        torch.manual_seed(step * workers.size + workers.rank)
        for micro_step in range(1, numbers.accumulation + 1):
            is_last = micro_step == numbers.accumulation
            with nullcontext() if is_last else optimizer.no_sync():
                with workers.autocast:
                    loss = loss_of(model, next(mine)) / numbers.accumulation
                loss.backward()
        if numbers.clip:
            nn.utils.clip_grad_norm_(model.parameters(), numbers.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % max(1, min(100, numbers.steps // 10)) == 0:
            value, pace = loss.item() * numbers.accumulation, time.monotonic() - started_s
            workers.say(f"step {step}  loss {value:.4f}  {(step - done) / pace:.2f} steps/s")
        is_end = step == numbers.steps
        if args.save_every and (is_end or step % args.save_every == 0):
            distlion.save_checkpoint(args.folder, model, optimizer, scheduler, keep_last=2)
        if is_end or step % args.eval_every == 0:
            model.eval()
            with torch.no_grad(), workers.autocast:
                workers.say(f"step {step}  {evaluate(model)}")
            model.train()
    workers.say(f"bytes sent in a step {optimizer.traffic.last_sent_bytes}")
    dist.destroy_process_group()
