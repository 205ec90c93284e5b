"""Dropout that seed, step and rank fix, whatever else the process has drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from distlion.lab.tasks import seeded_generator

# A stream of chance that must not follow the data's: seeded_generator(seed, step, rank, stream).
_STREAM = 1


@contextlib.contextmanager
def seeded_dropout(
    *, seed: int, step: int, rank: int, device: torch.device | None = None
) -> Iterator[None]:
    """Lend the global generator, from which dropout draws, one fixed by seed, step and rank.

    With a model on a GPU, ``device``, its generator is lent one too.
    """
    generator = seeded_generator(seed, step, rank, _STREAM)
    on_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.set_rng_state(generator.get_state())
        if on_gpu:
            torch.cuda.manual_seed(generator.initial_seed())
        yield
