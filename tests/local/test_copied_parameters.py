"""Inner optimizers that keep copies of the parameters, which votes do not move."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
from distlion.errors import CopiedParametersWarning
from drawn import make_params
from local_runs import EVERY, INNERS, SHAPES, train, train_virtually


class MasterSGD(torch.optim.SGD):
    """SGD of weights that it keeps in float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                master: Tensor = self.state[param].setdefault("master", param.float().clone())
                param.copy_(master.sub_(param.grad.float(), alpha=group["lr"]))


def make_master(params: Any) -> torch.optim.Optimizer:
    return MasterSGD(list(params), lr=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_the_inner_state_are_warned_of_after_the_first_vote(dtype: torch.dtype) -> None:
    params = make_params(SHAPES, dtype=dtype)
    optimizer = distlion.LocalSteps(make_master(params.values()), every=EVERY)
    with pytest.warns(CopiedParametersWarning, match="MasterSGD .* under master") as caught:
        train(optimizer, params.values(), 0, 0, 3 * EVERY)
    assert len(caught) == 1


def test_virtual_workers_warn_of_copies_too() -> None:
    params = list(make_params(SHAPES).values())
    cluster = distlion.VirtualLocalSteps(params, make_master, workers=2, every=EVERY)
    with pytest.warns(CopiedParametersWarning, match="MasterSGD"):
        train_virtually(cluster, params, 0, EVERY)


@pytest.mark.parametrize("make_inner", INNERS.values(), ids=INNERS)
def test_momenta_are_no_copies(make_inner: Any) -> None:
    params = make_params(SHAPES)
    optimizer = distlion.LocalSteps(make_inner(params.values()), every=EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CopiedParametersWarning)
        train(optimizer, params.values(), 0, 0, EVERY)


class NotingSGD(torch.optim.SGD):
    """SGD that notes each parameter in a form that no step writes back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["noted"] = param.to_sparse() if param.dim() else param.clone()


def test_sparse_state_and_numbers_are_no_copies() -> None:
    params = [torch.nn.Parameter(torch.tensor(8.0)), torch.nn.Parameter(torch.ones(5))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CopiedParametersWarning)
        for param in params:
            optimizer = distlion.LocalSteps(NotingSGD([param], lr=1e-3), every=1)
            param.grad = torch.ones_like(param)
            optimizer.step()
            assert optimizer.committed_step == 1
