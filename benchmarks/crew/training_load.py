"""The training of each worker of a soak: one network, data set and pace for every system."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    """A network, and how fast it is trained.

    Attributes:
        widths: Of its layers.
        batch_size: Rows of a worker and step.
        pace_s: A step begins no sooner after the one before; it leaves the cores to who forms an
            epoch.
        silence_s: How long a worker may be silent in a step until the others give it up.
        average_s: The same where gradients of 32 bits are averaged.
    """

    widths: tuple[int, ...]
    batch_size: int
    pace_s: float
    silence_s: int
    average_s: int

    @property
    def n_parameters(self) -> int:
        """Number of its parameters."""
        return sum(inputs * outputs + outputs for inputs, outputs in pairwise(self.widths))


SIZES = {
    "1m": Size((256, 1024, 640, 128), batch_size=16, pace_s=0.05, silence_s=4, average_s=4),
    "25m": Size((1024, 4096, 4096, 1024), batch_size=4, pace_s=0.5, silence_s=12, average_s=12),
    "125m": Size((4096, 8192, 8192, 3008), batch_size=2, pace_s=3.0, silence_s=30, average_s=90),
}
SIZE_KEY, ADDRESS_KEY, RETRIES_KEY = "SOAK_SIZE", "SOAK_ADDRESS", "SOAK_RETRIES"
CHECKPOINTS_KEY = "SOAK_CHECKPOINTS"
SIZE = SIZES[os.environ.get(SIZE_KEY, "1m")]
ADDRESS = os.environ.get(ADDRESS_KEY, "127.0.0.1")
"""Of this worker, for the others."""
RETRIES = os.environ.get(RETRIES_KEY) == "1"
"""True: after a change of members, a crew's ``step()`` votes again by the gradients it has."""
CHECKPOINTS = Path(os.environ[CHECKPOINTS_KEY]) if CHECKPOINTS_KEY in os.environ else None
"""Folder of checkpoints; None where workers make none."""
SAVE_EVERY = 20
"""Steps between two checkpoints."""
LR = 1e-4
HEARTBEAT_S = 1
"""The same without heartbeats, where a system has them."""
MIN_WORKERS, MAX_WORKERS = 2, 6


def build_model() -> nn.Sequential:
    """Build the network, and run one pass: nobody is to wait for the first one of a newcomer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZE.widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    compute_loss(model, step=0, place=0).backward()
    model.zero_grad()
    return model


def compute_loss(model: nn.Module, *, step: int, place: int) -> torch.Tensor:
    """Return the loss of the batch of a worker in a step."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    inputs = torch.randn(SIZE.batch_size, SIZE.widths[0], generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs[:, : SIZE.widths[-1]])


class Pace:
    """Hold steps to a rate."""

    def __init__(self) -> None:
        self._due_s = time.monotonic()

    def wait(self) -> None:
        """Wait until the next step is due."""
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = time.monotonic() + SIZE.pace_s
