"""Rows of docs/reference/conformance.md: schedulers, and what param groups hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

import distlion
from distlion import errors
from torch_rows import LR, Row, bits_of, make_lion, make_model, row, train

ROWS: dict[str, Row] = {}


def follow(make: Callable[[Optimizer], Any], rank: int, **options: Any) -> None:
    """Compare what a scheduler writes with what it writes for AdamW, and what a step does by it."""
    ours, theirs = make_model(), make_model()
    lion = make_lion(ours, weight_decay=0.0, **options)
    adam = AdamW(theirs.parameters(), lr=options.get("lr", LR), betas=(0.9, 0.95))
    for step in range(4):
        lr = float(lion.param_groups[0]["lr"])
        assert lr == float(adam.param_groups[0]["lr"])
        assert lion.param_groups[0]["betas"] == adam.param_groups[0]["betas"]
        before = bits_of(ours)
        train(ours, lion, rank, first=step, steps=1)
        train(theirs, adam, rank, first=step, steps=1)
        for old, new in zip(before, bits_of(ours), strict=True):
            # Every element moves by lr; its parameter is rounded once, to 2^-24 of at most 1.
            torch.testing.assert_close(
                (new - old).abs(), torch.full_like(old, lr), rtol=0, atol=1e-7
            )
        if step == 0:
            scheduler, other = make(lion), make(adam)
        else:
            scheduler.step()
            other.step()


@row(ROWS, "torch's schedulers: constant, step, linear, polynomial, exponential, cosine, lambda")
def run_schedulers(rank: int) -> None:
    for make in (
        lambda o: schedulers.ConstantLR(o, total_iters=2),
        lambda o: schedulers.StepLR(o, 1),
        lambda o: schedulers.MultiStepLR(o, [1, 2]),
        schedulers.LinearLR,
        lambda o: schedulers.PolynomialLR(o, total_iters=5),
        lambda o: schedulers.ExponentialLR(o, 0.9),
        lambda o: schedulers.CosineAnnealingLR(o, 10),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
        lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    ):
        follow(make, rank)


@row(ROWS, "`SequentialLR`, `ChainedScheduler`")
def run_composed_schedulers(rank: int) -> None:
    follow(
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 5)], [2]
        ),
        rank,
    )
    follow(
        lambda o: schedulers.ChainedScheduler(
            [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)]
        ),
        rank,
    )


@row(ROWS, "`OneCycleLR` and `CyclicLR`, which also cycle `betas`")
def run_cyclic_schedulers(rank: int) -> None:
    follow(lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=10), rank)
    follow(lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, step_size_up=2), rank)
    follow(lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, cycle_momentum=False), rank)


@row(ROWS, "`ReduceLROnPlateau`")
def run_plateau(rank: int) -> None:
    model = make_model()
    lion = make_lion(model)
    scheduler = schedulers.ReduceLROnPlateau(lion, patience=0)
    for step in range(3):
        train(model, lion, rank, first=step, steps=1)
        scheduler.step(1.0)
    assert lion.param_groups[0]["lr"] == pytest.approx(LR * 0.1**2)
    # A validation loss of its own on each rank lets them part: that is heard at the next step.
    for metric in (1.0 - rank, 1.0 - rank):
        scheduler.step(metric)
    with pytest.raises(errors.ConfigMismatchError, match="lr of group 0"):
        train(model, lion, rank, steps=1)


@row(ROWS, "Schedulers of transformers (`get_scheduler`)")
def run_transformers_schedulers(rank: int) -> None:
    from transformers import get_scheduler

    for name, special in (
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {}),
        ("constant_with_warmup", {}),
        ("polynomial", {}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": 1e-4}),
        ("warmup_stable_decay", {"num_decay_steps": 3}),
    ):

        def make(optimizer: Optimizer, name: str = name, special: dict[str, Any] = special) -> Any:
            return get_scheduler(name, optimizer, 2, 10, scheduler_specific_kwargs=special)

        follow(make, rank)


@row(ROWS, "A scheduler's state beside the optimizer's, saved and loaded")
def resume_schedule(rank: int) -> None:
    model = make_model()
    lion = make_lion(model)
    scheduler = schedulers.StepLR(lion, 1)
    train(model, lion, rank, steps=1)
    scheduler.step()
    saved = copy.deepcopy((lion.state_dict(), scheduler.state_dict()))
    other = make_lion(model)
    other_scheduler = schedulers.StepLR(other, 1)
    other.load_state_dict(saved[0])
    other_scheduler.load_state_dict(saved[1])
    for one in (lion, other):
        group = one.param_groups[0]
        assert (group["lr"], group["initial_lr"]) == (pytest.approx(LR * 0.1), LR)
    assert other_scheduler.last_epoch == 1


@row(ROWS, "`lr` as a tensor, with a scheduler")
def schedule_tensor(rank: int) -> None:
    follow(lambda o: schedulers.StepLR(o, 1), rank, lr=torch.tensor(LR))


@row(ROWS, "Param groups with settings of their own; `add_param_group`; named parameters")
def add_group(rank: int) -> None:
    model, added = make_model(), nn.Linear(2, 2)
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    vectors = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
    lion = distlion.DistributedLion(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "aggregation": distlion.TernaryVote()},
        ],
        lr=LR,
    )
    train(model, lion, rank, steps=2)
    lion.add_param_group({"params": list(added.named_parameters()), "lr": 0.5})
    before = bits_of(added)
    for param in added.parameters():
        param.grad = torch.ones_like(param)
    train(model, lion, rank, steps=1)
    assert [group["lr"] for group in lion.param_groups] == [LR, LR, 0.5]
    assert lion.param_groups[2]["param_names"] == ["weight", "bias"]
    for old, new in zip(before, bits_of(added), strict=True):
        torch.testing.assert_close(old - new, torch.full_like(old, 0.5), rtol=0, atol=1e-7)
    lion.verify_replicas()


@row(ROWS, "`maximize`, `differentiable`, `amsgrad`, `nesterov`; `fused`, `foreach`, `capturable`")
def refuse_switches(rank: int) -> None:
    for switch in ("maximize", "differentiable", "amsgrad", "nesterov"):
        with pytest.raises(errors.InvalidArgumentError, match=f"{switch}=True"):
            distlion.DistributedLion([{"params": make_model().parameters(), switch: True}])
    for switch in ("maximize", "fused", "foreach", "capturable", "differentiable"):
        with pytest.raises(TypeError, match=switch):
            make_lion(make_model(), **{switch: True})
