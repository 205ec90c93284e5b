"""Rows of docs/reference/conformance.md: what is saved, loaded and refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import distlion
from distlion import errors
from torch_rows import LR, Row, are_equal, bits_of, loss_of, make_lion, make_model, row, train

ROWS: dict[str, Row] = {}


def resume(
    rank: int, pass_on: Callable[[nn.Module, Optimizer, nn.Module, Optimizer], None]
) -> None:
    """Save after two steps, load into a new model and optimizer, and compare two more steps."""
    model, other = make_model(), make_model(seed=1)
    lion = make_lion(model, momentum_sync=distlion.MomentumSync(every=3))
    train(model, lion, rank, steps=2)
    other_lion = make_lion(other, lr=0.5, momentum_sync=distlion.MomentumSync(every=3))
    other.load_state_dict(model.state_dict())
    pass_on(model, lion, other, other_lion)
    assert other_lion.committed_step == 2
    train(model, lion, rank, first=2, steps=2)
    train(other, other_lion, rank, first=2, steps=2)
    assert are_equal(bits_of(model), bits_of(other))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(lion.state[one]["exp_avg"], other_lion.state[two]["exp_avg"])


@row(ROWS, "`state_dict` by `torch.save`, and `torch.load(weights_only=True)`")
def load_weights_only(rank: int) -> None:
    def pass_on(model: Any, lion: Any, other: Any, other_lion: Any) -> None:
        file = io.BytesIO()
        torch.save(lion.state_dict(), file)
        file.seek(0)
        other_lion.load_state_dict(torch.load(file, weights_only=True))

    resume(rank, pass_on)


@row(ROWS, "`get_optimizer_state_dict`, `set_optimizer_state_dict`")
def use_named_state(rank: int) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    def pass_on(model: Any, lion: Any, other: Any, other_lion: Any) -> None:
        state = dcp.get_optimizer_state_dict(model, lion)
        assert set(state["state"]) == {name for name, _ in model.named_parameters()}
        dcp.set_optimizer_state_dict(other, other_lion, state)

    resume(rank, pass_on)


@row(ROWS, "The same, flattened (`flatten_optimizer_state_dict`)")
def use_flat_state(rank: int) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)

    def pass_on(model: Any, lion: Any, other: Any, other_lion: Any) -> None:
        state = dcp.get_optimizer_state_dict(model, lion, options=options)
        assert state["param_groups.0.weight.lr"] == LR
        dcp.set_optimizer_state_dict(other, other_lion, state, options=options)

    resume(rank, pass_on)


@row(ROWS, "State of a Lion of another library; of an optimizer that is no Lion")
def load_foreign_state(rank: int) -> None:
    import lion_pytorch

    model = make_model()
    foreign = lion_pytorch.Lion(model.parameters(), lr=1e-3)
    adam = AdamW(model.parameters())
    loss_of(model, 0, 0).backward()
    foreign.step()
    adam.step()
    lion = make_lion(model)
    lion.load_state_dict(foreign.state_dict())
    assert lion.param_groups[0]["lr"] == 1e-3
    for param in model.parameters():
        assert torch.equal(lion.state[param]["exp_avg"], foreign.state[param]["exp_avg"])
    with pytest.raises(errors.CheckpointError, match="which Lion does not have"):
        lion.load_state_dict(adam.state_dict())


@row(ROWS, "`copy.deepcopy`, `pickle`, `torch.save` of the optimizer itself")
def refuse_copies(rank: int) -> None:
    lion = make_lion(make_model())
    for copied in (copy.deepcopy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(errors.UnsupportedTypeError, match="save_checkpoint"):
            copied(lion)


@row(ROWS, "`ZeroRedundancyOptimizer`")
def refuse_zero(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pytest.raises(errors.ConfigMismatchError, match="parameter 0 of group 0"):
        ZeroRedundancyOptimizer(make_model().parameters(), distlion.DistributedLion, lr=LR)
