"""Names of methods whose hidden matrices are orthogonalized."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from distlion.errors import InvalidArgumentError
from distlion.kernels import orthogonalize
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import TrainSettings
from distlion_lab.training.workers import MethodRun, name_matrices

VOTES = {
    "majority-orthogonal": (0.9, 0.99),
    "majority-orthogonal-betas-90-95": (0.9, 0.95),
    "feedback-2-orthogonal-betas-90-95": (0.9, 0.95),
    "global-lion-orthogonal-betas-90-95": (0.9, 0.95),
}
LR, DECAY = 0.01, 0.1


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def enter(name: str, model: nn.Module) -> Any:
    run = MethodRun(
        list(model.named_parameters()),
        lr=LR,
        weight_decay=DECAY,
        workers=2,
        steps=1,
        seed=0,
        matrices=name_matrices(model),
    )
    return find_method(name).enter(run)


@pytest.mark.parametrize("name", VOTES)
def test_hidden_matrices_are_orthogonalized_and_all_others_cautious(name: str) -> None:
    model = build_model()
    matrices, others = enter(name, model).optimizer.param_groups
    assert [id(param) for param in matrices["params"]] == [id(model[0].weight)]
    assert (matrices["orthogonalize"], matrices["cautious"]) == (True, False)
    assert (others["orthogonalize"], others["cautious"]) == (False, True)
    assert len(others["params"]) == 5
    assert {group["betas"] for group in (matrices, others)} == {VOTES[name]}


@pytest.mark.parametrize("name", ["majority-orthogonal-betas-90-95", "global-muon-betas-90-99"])
def test_train_knows_them(name: str) -> None:
    assert TrainSettings.with_defaults(rule=name).rule == name


def test_mask_at_the_counter_is_refused_with_its_reason() -> None:
    with pytest.raises(InvalidArgumentError, match="'masked-orthogonal': a mask at the counter"):
        find_method("masked-orthogonal")


@pytest.mark.parametrize(
    "name", ["majority-orthogonal-cautious", "global-adamw-orthogonal", "orthogonal"]
)
def test_what_cannot_be_orthogonalized_is_unknown(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}' is unknown"):
        find_method(name)


def test_muon_moves_matrices_and_adamw_all_others() -> None:
    """Two steps beside AdamW of torch and Muon's equations."""
    model, beside = build_model(), build_model()
    workers = enter("global-muon-betas-90-99", model)
    adamw = torch.optim.AdamW(beside.parameters(), LR, (0.9, 0.99), weight_decay=DECAY)
    matrix, momentum = beside[0].weight.detach().clone(), torch.zeros(5, 6)
    for step in range(2):
        inputs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        for worker in range(2):
            model(inputs[worker]).square().sum().backward()
            workers.collect(worker)
        with torch.no_grad():
            beside[0].weight.copy_(matrix)
        adamw.zero_grad()
        (sum(beside(each).square().sum() for each in inputs) / 2).backward()
        grad = beside[0].weight.grad
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonalize(0.95 * momentum + 0.05 * grad)
        matrix = matrix * (1 - LR * DECAY) - LR * 0.2 * math.sqrt(6) * update
        adamw.step()
        workers.step()
    torch.testing.assert_close(model[0].weight, matrix)
    for name, param in model.named_parameters():
        if name != "0.weight":
            torch.testing.assert_close(param, beside.get_parameter(name))
