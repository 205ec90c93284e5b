"""Inner state of local steps that has another form than AdamW's, or that some worker lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from checkpoint.test_local_steps_saved import AT, STEPS, LocalWorker
from cluster import run_workers
from drawn import make_params
from local_runs import EVERY, are_equal, train


class CountingSGD(torch.optim.SGD):
    """SGD that counts its steps, in a key of its own beside "state" and "param_groups"."""

    counted = 0

    def step(self, closure: Any = None) -> Any:
        self.counted += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counted": self.counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counted = state_dict["counted"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def make_counting(model: nn.Module) -> CountingSGD:
    return CountingSGD(model.parameters(), lr=1e-2, momentum=0.9)


def make_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def test_a_state_keeps_keys_of_the_inner_optimizers_own() -> None:
    params = make_params({"p": 5})
    optimizers = [
        distlion.LocalSteps(CountingSGD(params.values(), lr=0.1), every=EVERY) for _ in range(2)
    ]
    train(optimizers[0], params.values(), 0, 0, EVERY)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].inner.counted == EVERY  # type: ignore[attr-defined]


def test_a_checkpoint_keeps_keys_of_the_inner_optimizers_own(tmp_path: Path) -> None:
    path = LocalWorker(0, make_inner=make_counting).train(0, AT).save(tmp_path)
    worker = LocalWorker(0, make_inner=make_counting)
    worker.load(path)
    assert worker.inner.counted == AT  # type: ignore[attr-defined]


class SharingSGD(torch.optim.SGD):
    """SGD with a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["shared"] = {"steps": 1 + self.state["shared"].get("steps", 0)}
        return super().step(closure)


def test_a_checkpoint_keeps_inner_state_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    def make_inner(model: nn.Module) -> torch.optim.Optimizer:
        return SharingSGD(model.parameters(), lr=1e-2, momentum=0.9)

    path = LocalWorker(0, make_inner=make_inner).train(0, AT).save(tmp_path)
    worker = LocalWorker(0, make_inner=make_inner)
    worker.load(path)
    assert worker.inner.state["shared"] == {"steps": AT}


def save_adafactor(rank: int, world_size: int, folder: str) -> None:
    LocalWorker(rank, make_inner=make_adafactor).train(0, AT).save(folder)


@pytest.mark.distributed
def test_reset_leaves_no_inner_state_of_any_shape(tmp_path: Path) -> None:
    run_workers(save_adafactor, 2, str(tmp_path))
    worker = LocalWorker(0, make_inner=make_adafactor)
    worker.load(tmp_path, on_world_change="reset")
    assert not worker.optimizer.state


def save_without_a_gradient(rank: int, world_size: int, folder: str) -> list[Tensor]:
    """Save before worker 1 had a gradient for the first parameter; return the second momenta."""
    worker = LocalWorker(rank)
    first = next(worker.model.parameters())
    if rank:
        first.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    worker.train(0, AT).save(folder)
    assert (first in worker.optimizer.state) == (rank == 0)
    return [entry["exp_avg_sq"].clone() for entry in worker.optimizer.state.values()]


@pytest.mark.distributed
def test_a_mean_of_inner_state_leaves_out_workers_without_it(tmp_path: Path) -> None:
    first, second = run_workers(save_without_a_gradient, 2, str(tmp_path))
    worker = LocalWorker(0)
    worker.load(tmp_path, on_world_change="mean")
    found = [entry["exp_avg_sq"] for entry in worker.optimizer.state.values()]
    assert torch.equal(found[0], first[0])
    pairs = zip(first[1:], second, strict=True)
    means = [(one.double() + other.double()).mul(0.5).float() for one, other in pairs]
    assert are_equal(found[1:], means)


def test_a_checkpoint_loads_under_inference_mode(tmp_path: Path) -> None:
    worker = LocalWorker(0).train(0, AT)
    path = worker.save(tmp_path)
    whole = worker.train(AT, STEPS).tensors()
    resumed = LocalWorker(0)
    with torch.inference_mode():
        resumed.load(path)
    assert are_equal(resumed.train(AT, STEPS).tensors(), whole)
