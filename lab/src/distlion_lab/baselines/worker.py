"""One worker's side of a method: its states, and its random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from distlion.kernels.coin import mix
from distlion_lab.baselines.base import Compression, CompressionStep, Payload, State


class Worker:
    """Compress the gradients of one worker, which is a process or a virtual worker.

    State is kept by parameter, numbered by its place in the model: DDP's buckets change after the
    first step.

    Args:
        compression: The method.
        rank: Number of this worker.
        n_workers: Number of workers in the average.
        seed: Seed, equal on all workers.
    """

    def __init__(self, compression: Compression, *, rank: int, n_workers: int, seed: int) -> None:
        self._compression = compression
        self._rank = rank
        self._n_workers = n_workers
        self._seed = seed
        self._states: dict[int, State] = {}

    def compress(self, index: int, grad: Tensor, *, step: int, scalar: Tensor) -> Payload:
        """Compress one gradient and keep the parameter's new state.

        Args:
            index: Number of the parameter, counted from 0.
            grad: (n,) float32. Read only.
            step: Number of the step, counted from 0.
            scalar: () float32, the largest ``measure`` of all workers.
        """
        if index not in self._states:
            self._states[index] = self._compression.create_state(grad.numel(), grad.device)
        generator = self._make_generator(index, step, grad.device)
        at = CompressionStep(step, self._n_workers, generator, scalar)
        payload, self._states[index] = self._compression.compress(grad, self._states[index], at)
        return payload

    def _make_generator(self, index: int, step: int, device: torch.device) -> torch.Generator:
        """Make the generator of a parameter; numbers differ between kinds of devices."""
        key = mix(mix(mix(mix(self._seed) + step) + self._rank) + index)
        return torch.Generator(device).manual_seed(key >> 1)
