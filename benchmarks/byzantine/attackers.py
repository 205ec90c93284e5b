"""One training run with Byzantine workers among virtual ones."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.lr_scheduler import LambdaLR

from distlion.optim import Lion
from distlion.virtual import VirtualCluster
from distlion.votes import Aggregation, Average, MajorityVote, QuantizedVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.ternary import TernaryVote
from distlion_lab.baselines.virtual import VirtualBaseline
from distlion_lab.tasks.base import Batch, score_batch, seeded_generator
from distlion_lab.tasks.images import ImageTask

AVERAGING = "Lion on the mean gradient"
METHODS: dict[str, Aggregation | None] = {
    "MajorityVote()": MajorityVote(),
    "TernaryVote()": TernaryVote(),
    "Average()": Average(),
    "QuantizedVote(bits=2)": QuantizedVote(bits=2),
    "FullPrecision()": FullPrecision(),
    AVERAGING: None,
}
SCALE = -100.0
BATCH_SIZE = 8
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.99)
WARM_UP_STEPS = 10
CLASSES = 10
VIT = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": CLASSES,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

Grads = dict[str, Tensor]


def flip(grad: Tensor, generator: torch.Generator) -> Tensor:
    return -grad


def randomize(grad: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(grad.shape, generator=generator)
    return noise * (grad.norm() / noise.norm())


def scale(grad: Tensor, generator: torch.Generator) -> Tensor:
    return SCALE * grad


ATTACKS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "flip": flip,
    "randomize": randomize,
    "scale": scale,
}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        method: A name of METHODS.
        attack: A name of ATTACKS; without meaning where nobody is Byzantine.
        byzantine: b: workers 0 to b - 1 are Byzantine.
        workers: N.
        seed: Of the weights, the order of the images and the noise.
        lr: The highest one.
        steps: Of training.
    """

    method: str
    attack: str
    byzantine: int
    workers: int
    seed: int
    lr: float
    steps: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended, on held-out images.

    Attributes:
        validation_loss: In nats an image; chooses the learning rate.
        accuracy: Share that is classified rightly, of other images.
    """

    validation_loss: float
    accuracy: float


@lru_cache(maxsize=1)
def load_task() -> ImageTask:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "vit.json"
        config.write_text(json.dumps(VIT))
        return ImageTask(data=None, model_config=config, batch_size=BATCH_SIZE)


def build_model(seed: int) -> nn.Module:
    model = load_task().build_model(seed=seed)
    # Fused attention has no rule for vmap.
    model.set_attn_implementation("eager")
    return model


def gradients(model: nn.Module, batches: Sequence[Batch]) -> Grads:
    """Compute each worker's gradient: (workers, *param.shape) for each parameter."""

    def loss(params: Grads, images: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(model, params, kwargs={"pixel_values": images}).logits
        return F.cross_entropy(logits, labels)

    params = {name: param.detach() for name, param in model.named_parameters()}
    images = torch.stack([batch.inputs["pixel_values"] for batch in batches])
    labels = torch.stack([batch.targets for batch in batches])
    found: Grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, images, labels)
    return found


def corrupt_(grads: Grads, run: Run, step: int) -> None:
    """Replace what the Byzantine workers hand in."""
    for worker in range(run.byzantine):
        generator = seeded_generator(run.seed, step, worker)
        for each in grads.values():
            each[worker] = ATTACKS[run.attack](each[worker], generator)


def make_method(run: Run, model: nn.Module) -> tuple[VirtualCluster | VirtualBaseline, LambdaLR]:
    rule = METHODS[run.method]
    hyper: dict[str, Any] = {"lr": run.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    factor = partial(lr_factor, steps=run.steps)
    if rule is None:
        lion = Lion(model.parameters(), **hyper)
        return VirtualBaseline(lion, workers=run.workers), LambdaLR(lion, factor)
    cluster = VirtualCluster(
        model.named_parameters(), workers=run.workers, aggregation=rule, seed=run.seed, **hyper
    )
    return cluster, LambdaLR(cluster, factor)


def lr_factor(step: int, steps: int) -> float:
    """Warm up linearly, then fall linearly to 0."""
    return min((step + 1) / WARM_UP_STEPS, 1.0) * (1.0 - step / steps)


def train(run: Run) -> Outcome:
    torch.set_num_threads(1)
    task, model = load_task(), build_model(run.seed)
    method, schedule = make_method(run, model)
    named = list(model.named_parameters())
    for step in range(run.steps):
        batches = [
            task.training_batch(seed=run.seed, step=step, rank=rank, world_size=run.workers)
            for rank in range(run.workers)
        ]
        grads = gradients(model, batches)
        corrupt_(grads, run, step)
        for worker in range(run.workers):
            for name, param in named:
                param.grad = grads[name][worker]
            method.collect(worker)
        method.step()
        schedule.step()
    heldout = task.heldout_batches()
    return Outcome(score(model, heldout[0::2])[0], score(model, heldout[1::2])[1])


def score(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return loss and accuracy."""
    scores = [score_batch(model, batch) for batch in batches]
    count = sum(each.count for each in scores)
    loss = sum(each.loss_sum for each in scores) / count
    return loss, sum(each.correct for each in scores) / count
