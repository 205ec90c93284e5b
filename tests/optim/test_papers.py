"""The papers' settings are a method whatever the defaults are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("paper", "rule", "sync"),
    [
        ("2404.00438", distlion.MajorityVote(), None),
        ("arXiv:2404.00438", distlion.MajorityVote(), None),
        ("2411.16462", distlion.QuantizedVote(bits=2), distlion.MomentumSync(every=100)),
    ],
)
def test_settings_make_the_paper_s_optimizer(paper: str, rule: Any, sync: Any) -> None:
    settings = distlion.paper_settings(paper)
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    optimizer = distlion.DistributedLion([param], lr=0.5, **settings)
    param.grad = torch.tensor([1.0, 1.0, -4.0])
    optimizer.step()

    assert settings == {
        "betas": (0.9, 0.99),
        "cautious": False,
        "aggregation": rule,
        "momentum_sync": sync,
    }
    assert param.tolist() == [0.5, -2.5, 3.5]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_constructors_have_the_betas_that_the_study_chose() -> None:
    param = nn.Parameter(torch.ones(3))
    made = (
        distlion.Lion([param]),
        distlion.DistributedLion([param]),
        distlion.VirtualCluster([param], workers=2),
    )

    assert [each.param_groups[0]["betas"] for each in made] == [(0.9, 0.95)] * 3


def test_lion_cub_has_its_paper_s_settings() -> None:
    param = nn.Parameter(torch.ones(3))
    cub = distlion.lion_cub([param])
    given = distlion.DistributedLion([param], **distlion.paper_settings("2411.16462"))

    assert cub.settings == given.settings


def test_changing_what_was_returned_changes_no_paper() -> None:
    distlion.paper_settings("2404.00438")["betas"] = (0.0, 0.0)

    assert distlion.paper_settings("2404.00438")["betas"] == (0.9, 0.99)


@pytest.mark.parametrize("paper", ["2411.16085", "", "lion", 2404.00438, None, ["2404.00438"]])
def test_other_papers_are_refused(paper: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Expected '2404\.00438' or '2411\.16462'"):
        distlion.paper_settings(paper)
