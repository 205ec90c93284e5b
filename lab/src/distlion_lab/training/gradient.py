"""A worker's gradient, with dropout that depends on seed, step and rank alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from distlion_lab.tasks.base import Batch, batch_loss, seeded_generator
from distlion_lab.training.device import move_batch

# A stream apart from the data's: seeded_generator(seed, step, rank, stream).
_STREAM = 1


@contextlib.contextmanager
def seeded_dropout(
    *, seed: int, step: int, rank: int, device: torch.device | None = None
) -> Iterator[None]:
    """Set the state of the global generator, from which dropout draws, by seed, step and rank.

    If the model is on a GPU, ``device``, its generator is set too. Both get their states back.
    """
    generator = seeded_generator(seed, step, rank, _STREAM)
    on_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.set_rng_state(generator.get_state())
        if on_gpu:
            torch.cuda.manual_seed(generator.initial_seed())
        yield


def compute_gradient(
    model: nn.Module, batch: Batch, *, seed: int, step: int, rank: int, device: torch.device
) -> Tensor:
    """Add a batch's gradient to every ``p.grad``; return the loss, (), detached."""
    with seeded_dropout(seed=seed, step=step, rank=rank, device=device):
        loss = batch_loss(model, move_batch(batch, device))
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
