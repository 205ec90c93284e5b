"""Rows of docs/reference/conformance.md: a step, and what surrounds it."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

import distlion
from torch_rows import (
    LR,
    Row,
    are_equal,
    bits_of,
    loss_of,
    make_batch,
    make_lion,
    make_model,
    row,
    train,
    trained_plainly,
)

ROWS: dict[str, Row] = {}


@row(ROWS, "`step(closure)`")
def step_with_closure(rank: int) -> None:
    model = make_model()
    lion = make_lion(model)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            lion.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss

        expected = float(loss_of(model, step, rank).detach())
        assert float(lion.step(closure).detach()) == expected
    assert are_equal(bits_of(model), trained_plainly(rank))


@row(ROWS, "Step hooks, before and after, of one optimizer and of all")
def run_step_hooks(rank: int) -> None:
    model = make_model()
    lion = make_lion(model, nonfinite="skip")
    seen: list[str] = []
    lion.register_step_pre_hook(lambda *_: seen.append("before"))
    lion.register_step_post_hook(lambda *_: seen.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("all"))
    try:
        train(model, lion, rank, steps=2)
        for param in model.parameters():
            param.grad = torch.full_like(param, float("nan"))
        lion.step()  # skipped by all
    finally:
        handle.remove()
    assert lion.committed_step == 2
    assert seen == ["before", "after", "all"] * 3


@row(ROWS, "Hooks of `state_dict` and `load_state_dict`")
def run_state_hooks(rank: int) -> None:
    lion = make_lion(make_model())
    seen: list[str] = []
    lion.register_state_dict_pre_hook(lambda *_: seen.append("before saving"))
    lion.register_state_dict_post_hook(lambda *_: seen.append("after saving"))
    lion.register_load_state_dict_pre_hook(lambda *_: seen.append("before loading"))
    lion.register_load_state_dict_post_hook(lambda *_: seen.append("after loading"))
    lion.load_state_dict(lion.state_dict())
    assert seen == ["before saving", "after saving", "before loading", "after loading"]


@row(ROWS, "`zero_grad(set_to_none=False)`")
def zero_in_place(rank: int) -> None:
    model = make_model()
    lion = make_lion(model)
    for step in range(3):
        loss_of(model, step, rank).backward()
        lion.step()
        lion.zero_grad(set_to_none=False)
        assert all(not param.grad.any() for param in model.parameters())  # type: ignore[union-attr]
    assert are_equal(bits_of(model), trained_plainly(rank))


@row(ROWS, "`clip_grad_norm_`, `clip_grad_value_`")
def clip(rank: int) -> None:
    """A limit that nothing exceeds changes no bit; what is clipped is what momenta see."""
    model = make_model()
    lion = make_lion(model)
    for step in range(3):
        loss_of(model, step, rank).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e6)) == float(norm)
        nn.utils.clip_grad_value_(model.parameters(), 1e6)
        lion.step()
        lion.zero_grad()
    assert are_equal(bits_of(model), trained_plainly(rank))
    loss_of(model, 3, rank).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    first = next(model.parameters())
    before, grad = lion.state[first]["exp_avg"].clone(), first.grad
    assert grad is not None
    lion.step()
    torch.testing.assert_close(lion.state[first]["exp_avg"], 0.95 * before + 0.05 * grad)


@row(ROWS, "`GradScaler`: `step`, `unscale_`, clipping; an overflow on one rank")
def scale_gradients(rank: int) -> None:
    """The scale is a power of two, so that unscaling is exact."""
    for unscale in (False, True):
        model = make_model()
        lion = make_lion(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            scaler.scale(loss_of(model, step, rank)).backward()
            if unscale:
                scaler.unscale_(lion)
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(lion)
            scaler.update()
            lion.zero_grad()
        assert are_equal(bits_of(model), trained_plainly(rank))
        scaler.scale(loss_of(model, 3, rank) * (float("inf") if rank == 1 else 1.0)).backward()
        scaler.step(lion)
        scaler.update()
        assert (scaler.get_scale(), lion.committed_step) == (512.0, 3)


@row(ROWS, "EMA and SWA: `AveragedModel`, `SWALR`")
def average_weights(rank: int) -> None:
    model = make_model()
    lion = make_lion(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    swa, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(lion, swa_lr=0.05)
    expected = bits_of(model)
    for step in range(3):
        train(model, lion, rank, first=step, steps=1)
        ema.update_parameters(model)
        swa.update_parameters(model)
        schedule.step()
        now = bits_of(model)
        expected = (
            now if step == 0 else [e.lerp(n, 0.5) for e, n in zip(expected, now, strict=True)]
        )
    torch.testing.assert_close(bits_of(ema), expected)
    assert LR < lion.param_groups[0]["lr"] < 0.05
    # Replicas are equal, and so are means of them: the optimizer can compare those too.
    distlion.DistributedLion(swa.module.parameters()).verify_replicas()


@row(ROWS, "`torch.compile` of the model, of `optimizer.step`, of a whole step")
def compile_steps(rank: int) -> None:
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    lion = make_lion(model)
    step_of = torch.compile(lion.step, backend="eager")
    for step in range(3):
        loss_of(compiled, step, rank).backward()
        step_of()
        lion.zero_grad()
    assert are_equal(bits_of(model), trained_plainly(rank))

    whole = make_model()
    other = make_lion(whole)

    @torch.compile(backend="eager")
    def train_step(batch: Tensor) -> Tensor:
        loss: Tensor = whole(batch).square().mean()
        loss.backward()
        other.step()
        other.zero_grad()
        return loss

    for step in range(3):
        train_step(make_batch(step, rank))
    assert are_equal(bits_of(whole), trained_plainly(rank))


@row(ROWS, "One optimizer for each parameter, stepped by `register_post_accumulate_grad_hook`")
def step_in_backward(rank: int) -> None:
    model = make_model()
    lions = {
        param: distlion.DistributedLion([param], lr=LR, timeouts=distlion.Timeouts(step_s=20))
        for param in model.parameters()
    }

    def step_now(param: Tensor) -> None:
        lions[param].step()  # type: ignore[index]
        lions[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    for step in range(2):
        loss_of(model, step, rank).backward()
    for lion in lions.values():
        assert lion.committed_step == 2
        lion.verify_replicas()


@row(ROWS, "`isinstance(optimizer, torch.optim.Optimizer)`, `repr`, `defaults`")
def look_like_an_optimizer(rank: int) -> None:
    lion = make_lion(make_model())
    assert isinstance(lion, Optimizer)
    assert {"lr", "betas", "weight_decay"} <= set(lion.defaults)
    assert re.search(r"DistributedLion \(\nParameter Group 0\n.*lr: 0.01", repr(lion), re.DOTALL)
