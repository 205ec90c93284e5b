"""Votes that are committed a step late, beside a plain loop; and what decides about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distlion.virtual import VirtualCluster

STEPS, WORKERS = 6, 3


def _loss(model: nn.Module, step: int, worker: int) -> torch.Tensor:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + worker))
    return model(inputs).square().mean()


def _make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def test_gradients_are_those_before_the_last_commit(study: Any) -> None:
    methods, schedule = study.methods, study.schedule
    run = schedule.Run(lr=0.01, workers=WORKERS, steps=STEPS, seed=1)
    late_model, model, stale = _make_model(), _make_model(), _make_model()
    late = methods.build_method("delayed-majority-betas-90-95", late_model, run)
    cluster = VirtualCluster(
        model.named_parameters(),
        0.01,
        (0.9, 0.95),
        workers=WORKERS,
        weight_decay=run.decay / run.lr,
        seed=1,
    )
    newest = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        for worker in range(WORKERS):
            _loss(late_model, step, worker).backward()
            late.collect(worker)
            _loss(stale, step, worker).backward()
            for param, old in zip(model.parameters(), stale.parameters(), strict=True):
                param.grad, old.grad = old.grad, None
            cluster.collect(worker)
        late.step()
        with torch.no_grad():
            for old, value in zip(stale.parameters(), newest, strict=True):
                old.copy_(value)
        cluster.step()
        newest = [param.detach().clone() for param in model.parameters()]
        seen = model if step == STEPS - 1 else stale
        for own, expected in zip(late_model.parameters(), seen.parameters(), strict=True):
            assert torch.equal(own, expected)
    assert late.up_bits_per_parameter == 1
