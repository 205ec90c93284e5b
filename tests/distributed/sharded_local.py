"""Local steps of FSDP2 models for tests: made, trained, saved by torch's own formats, compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import distlion
from distlion.integrations.fsdp import disable_all_reduce
from distributed.sharded_models import build, digest, make_mesh, run_backward, shard

N_RANKS, EVERY, AT, STEPS = 4, 2, 3, 6


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2)


def make_lion(model: nn.Module) -> torch.optim.Optimizer:
    return distlion.Lion(model.named_parameters(), lr=1e-2)


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=1e-1)


def make_two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Make Muon for matrices, and AdamW for all others."""
    named = [*model.named_parameters()]
    return [
        torch.optim.Muon([each for each in named if each[1].ndim == 2], lr=1e-2),
        torch.optim.AdamW([each for each in named if each[1].ndim != 2], lr=1e-2),
    ]


class Local(torch.optim.Optimizer):
    """An inner optimizer that keeps local tensors, and numbers in Python."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in filter(lambda each: each.grad is not None, group["params"]):
                entry, grad = self.state[param], param.grad.to_local()
                if not entry:
                    entry |= {"mean": torch.zeros_like(grad), "count": 0, "rate": group["lr"]}
                entry["count"] += 1
                entry["rate"] *= 0.9
                entry["mean"].lerp_(grad, 1 / entry["count"])
                param.to_local().sub_(entry["rate"] * entry["mean"])


def make_local(model: nn.Module) -> torch.optim.Optimizer:
    return Local(model.named_parameters())


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (make_adamw, {"aggregation": distlion.ScaledVote()}),
    "momentum": (make_adamw, {"aggregation": distlion.ResidualVote(), "outer_momentum": 0.5}),
    "estimates": (make_adamw, {"aggregation": distlion.EstimateVote()}),
    "sgd": (make_sgd, {}),
    "local": (make_local, {}),
    "lion": (make_lion, {}),
    "two": (make_two, {"aggregation": distlion.ResidualVote()}),
    "2D": (make_adamw, {"aggregation": distlion.ResidualVote()}),
}


def make(case: str, seed: int, shards: int = 2, **more: Any) -> tuple[nn.Module, Any]:
    mesh = make_mesh(2, shards)
    model = shard(build(seed), mesh if case == "2D" else mesh["shard"])
    if case == "2D":
        disable_all_reduce(model)
    make_inner, options = CASES[case]
    settings = {"every": EVERY, "process_group": mesh["replicate"].get_group(), **options, **more}
    return model, distlion.LocalSteps(make_inner(model), **settings)


def train_unevenly(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Train without any gradient of the first parameter on worker 1."""
    for step in range(AT):
        run_backward(model, step, rank)
        if rank >= 2:
            next(model.parameters()).grad = None
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, optimizer: Any, rank: int, begin: int, end: int) -> None:
    for step in range(begin, end):
        run_backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def get_bits(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bytes(local.detach().contiguous().view(-1).view(torch.uint8).numpy())


def list_bits(model: nn.Module, optimizer: Any) -> list[Any]:
    """List all that must go on alike: places, parameters, common points and momenta."""
    common = optimizer.outer_optimizer
    kept = [*optimizer.common_point, *optimizer.outer_buffers]
    for entry in common.state.values():
        kept += [entry[key] for key in sorted(entry)]
    for param in model.parameters():
        entry = optimizer.state[param]
        kept += [torch.as_tensor(entry[key]) for key in sorted(entry)]
    place = *optimizer.progress, optimizer.committed_step
    return [place, digest(model), [get_bits(each) for each in kept]]
