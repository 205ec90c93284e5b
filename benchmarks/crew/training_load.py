"""The training of each worker of a soak: one network, data set and pace for every system."""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from torch import nn

WIDTHS = (256, 1024, 640, 128)
BATCH_SIZE = 16
LR = 1e-4
PACE_S = 0.05
"""A step begins no sooner after the one before; it leaves the cores to who forms an epoch."""
SILENCE_S = 4
"""How long a worker may be silent in a step until the others give it up."""
HEARTBEAT_S = 1
"""The same without heartbeats, where a system has them."""
MIN_WORKERS, MAX_WORKERS = 2, 6


def build_model() -> nn.Sequential:
    """Build a network of 1.0 million parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def compute_loss(model: nn.Module, *, step: int, place: int) -> torch.Tensor:
    """Return the loss of the batch of a worker in a step."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    inputs = torch.randn(BATCH_SIZE, WIDTHS[0], generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs[:, : WIDTHS[-1]])


class Pace:
    """Hold steps to a rate."""

    def __init__(self) -> None:
        self._due_s = time.monotonic()

    def wait(self) -> None:
        """Wait until the next step is due."""
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = time.monotonic() + PACE_S
