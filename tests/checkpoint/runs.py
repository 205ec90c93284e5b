"""Small runs of virtual workers that are saved, resumed, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import distlion

STEPS = 6


def make_model() -> torch.nn.Module:
    """Make a model with tied weights, a scalar, and buffers of floats and integers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 9), torch.nn.PReLU()
    )
    model[2].weight = model[0].weight
    return model


class Run:
    """A model, its virtual workers and a schedule.

    Args:
        workers: Their number.
        settings: Of ``VirtualCluster``.
    """

    def __init__(self, workers: int = 4, **settings: Any) -> None:
        self.model = make_model()
        settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
        self.optimizer = distlion.VirtualCluster(
            self.model.named_parameters(), workers=workers, **settings
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def train(self, start: int, stop: int) -> list[float]:
        """Do some steps; every batch depends on step and worker only."""
        losses = []
        for step in range(start, stop):
            for worker in range(self.optimizer.workers):
                generator = torch.Generator().manual_seed(100 * step + worker)
                loss = self.model(torch.randn(8, 9, generator=generator)).square().mean()
                loss.backward()
                self.optimizer.collect(worker)
                losses.append(float(loss.detach()))
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def save(self, path: Path, extra: Any = None, **options: Any) -> Path:
        """Save all of it, and wait."""
        return distlion.save_checkpoint(
            path, self.model, self.optimizer, self.scheduler, extra, **options
        ).wait()

    def load(self, path: Path, **options: Any) -> Any:
        """Load all of it."""
        return distlion.load_checkpoint(path, self.model, self.optimizer, self.scheduler, **options)

    def tensors(self) -> list[torch.Tensor]:
        """Copy parameters, buffers and momenta."""
        found = [*self.model.state_dict().values()]
        for worker in range(self.optimizer.workers):
            found += self.optimizer.exp_avg(worker)
        return [tensor.detach().clone() for tensor in found]

    def equals(self, tensors: list[torch.Tensor]) -> bool:
        """Whether it holds just these."""
        own = self.tensors()
        return len(own) == len(tensors) and all(map(torch.equal, own, tensors))
