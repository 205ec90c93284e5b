"""Names of methods whose directions are masked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distlion.errors import InvalidArgumentError
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import TrainSettings
from distlion_lab.training.workers import MethodRun

NAMES = {
    "majority-cautious": (0.9, 0.99),
    "majority-cautious-betas-90-95": (0.9, 0.95),
    "quantized-2-cautious-betas-90-95": (0.9, 0.95),
    "feedback-2-cautious-betas-90-95": (0.9, 0.95),
    "global-lion-cautious": (0.9, 0.99),
    "global-lion-cautious-betas-90-95": (0.9, 0.95),
}


def enter(name: str) -> torch.optim.Optimizer:
    params = [("w", nn.Parameter(torch.zeros(3)))]
    run = MethodRun(params, lr=1e-3, weight_decay=0.1, workers=2, steps=1, seed=0)
    return find_method(name).enter(run).optimizer


@pytest.mark.parametrize("name", NAMES)
def test_a_cautious_method_masks_directions_and_has_the_betas_of_its_name(name: str) -> None:
    group = enter(name).param_groups[0]
    assert (group["cautious"], group["betas"]) == (True, NAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_name_without_the_word_masks_nothing(name: str) -> None:
    assert enter(name.replace("-cautious", "")).param_groups[0]["cautious"] is False


@pytest.mark.parametrize("name", ["majority-cautious-betas-90-95", "global-lion-cautious"])
def test_train_knows_cautious_rules(name: str) -> None:
    assert TrainSettings.with_defaults(rule=name).rule == name


@pytest.mark.parametrize("name", ["global-adamw-cautious", "terngrad-cautious", "cautious"])
def test_what_is_no_lion_cannot_be_cautious(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        find_method(name)
    with pytest.raises(InvalidArgumentError, match=name):
        TrainSettings.with_defaults(rule=name)
