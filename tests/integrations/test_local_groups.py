"""Local steps over a Trainer's groups: what two places set is refused, not overridden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distlion
from distlion.errors import InvalidArgumentError

pytest.importorskip("transformers")
from distlion.integrations.transformers import _OverGroups

# To import the trainer takes seconds.
pytestmark = pytest.mark.slow


def make(**options: Any) -> distlion.LocalSteps:
    decayed, others = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [
        {"params": [decayed], "weight_decay": 0.1},
        {"params": [others], "weight_decay": 0.0},
    ]
    made: distlion.LocalSteps = _OverGroups(
        groups, lr=0.01, inner=torch.optim.AdamW, every=2, **options
    )
    return made


def test_groups_keep_what_the_trainer_gives_them() -> None:
    for options in ({}, {"weight_decay": 0.1}, {"inner_options": {"weight_decay": 0.1}}):
        made = make(**options)
        assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert make(inner_options={"betas": (0.8, 0.9)}).param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inner_options": {"weight_decay": 0.3}}, "TrainingArguments.weight_decay"),
        ({"weight_decay": 0.3}, "TrainingArguments.weight_decay"),
        ({"inner_options": {"lr": 0.3}}, "TrainingArguments.learning_rate"),
        ({"inner": None}, "torch.optim.AdamW"),
    ],
)
def test_what_the_trainer_sets_is_refused(options: dict[str, Any], words: str) -> None:
    if "inner" in options:
        with pytest.raises(InvalidArgumentError, match=words):
            _OverGroups([], lr=0.01, every=2)
        return
    with pytest.raises(InvalidArgumentError, match=words):
        make(**options)
