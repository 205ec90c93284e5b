"""Small runs that are saved, resumed, and compared: of virtual workers, and of a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import distlion

STEPS = 6
Tensors = list[torch.Tensor]


def make_model() -> torch.nn.Module:
    """Make a model with tied weights, a scalar, and buffers of floats and integers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 9), torch.nn.PReLU()
    )
    model[2].weight = model[0].weight
    return model


class Saved:
    """A model, an optimizer and a schedule, which are saved and loaded together."""

    def __init__(self, make_optimizer: Any, **settings: Any) -> None:
        self.model = make_model()
        settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
        self.optimizer = make_optimizer(self.model.named_parameters(), **settings)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def measure_loss(self, step: int, worker: int) -> torch.Tensor:
        """Measure a loss on a batch that depends on step and worker only."""
        generator = torch.Generator().manual_seed(100 * step + worker)
        loss: torch.Tensor = self.model(torch.randn(8, 9, generator=generator)).square().mean()
        return loss

    def save(self, path: Path | str, extra: Any = None, **options: Any) -> Path:
        """Save all of it, and wait."""
        return distlion.save_checkpoint(
            path, self.model, self.optimizer, self.scheduler, extra, **options
        ).wait()

    def load(self, path: Path | str, **options: Any) -> Any:
        """Load all of it."""
        return distlion.load_checkpoint(path, self.model, self.optimizer, self.scheduler, **options)

    def momenta(self) -> Tensors:
        """List the momenta that are kept here, of one worker after the other."""
        raise NotImplementedError

    def tensors(self) -> Tensors:
        """Copy parameters, buffers and momenta."""
        found = [*self.model.state_dict().values(), *self.momenta()]
        return [tensor.detach().clone() for tensor in found]

    def equals(self, tensors: Tensors) -> bool:
        """Whether it holds just these."""
        own = self.tensors()
        return len(own) == len(tensors) and all(map(torch.equal, own, tensors))


class Run(Saved):
    """Virtual workers.

    Args:
        workers: Their number.
        settings: Of ``VirtualCluster``.
    """

    def __init__(self, workers: int = 4, **settings: Any) -> None:
        super().__init__(distlion.VirtualCluster, workers=workers, **settings)

    def train(self, start: int, stop: int) -> list[float]:
        """Do some steps; return the losses of all workers."""
        losses = []
        for step in range(start, stop):
            for worker in range(self.optimizer.workers):
                loss = self.measure_loss(step, worker)
                loss.backward()
                self.optimizer.collect(worker)
                losses.append(float(loss.detach()))
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def momenta(self) -> Tensors:
        workers = range(self.optimizer.workers)
        return [tensor for worker in workers for tensor in self.optimizer.exp_avg(worker)]


class Worker(Saved):
    """One real worker.

    Args:
        rank: Its rank.
        settings: Of ``DistributedLion``.
    """

    def __init__(self, rank: int, **settings: Any) -> None:
        self.rank = rank
        super().__init__(distlion.DistributedLion, **settings)

    def train(self, start: int, stop: int) -> list[float]:
        """Do some steps; return the losses."""
        losses = []
        for step in range(start, stop):
            loss = self.measure_loss(step, self.rank)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    def momenta(self) -> Tensors:
        return [state["exp_avg"] for state in self.optimizer.state.values()]
