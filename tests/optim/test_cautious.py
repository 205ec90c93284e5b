"""Cautious directions: what moves, what stays, and what the mask must not hide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distlion
from distlion import errors


def make_lion(**arguments: object) -> tuple[nn.Parameter, distlion.Lion]:
    """Make a parameter whose momentum points up, down and nowhere."""
    param = nn.Parameter(torch.ones(3))
    lion = distlion.Lion([param], lr=0.5, betas=(0.5, 0.5), **arguments)  # type: ignore[arg-type]
    lion.state[param]["exp_avg"].copy_(torch.tensor([4.0, -4.0, 0.0]))
    return param, lion


def test_elements_whose_direction_and_gradient_differ_in_sign_stay_but_for_decay() -> None:
    param, lion = make_lion(cautious=True, weight_decay=0.5)
    param.grad = torch.tensor([-1.0, -1.0, 1.0])

    lion.step()

    assert param.tolist() == [0.75, 1.25, 0.25]
    assert lion.state[param]["exp_avg"].tolist() == [1.5, -2.5, 0.5]


def test_a_group_may_be_cautious_by_itself() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[:1], "cautious": True}, {"params": params[1:]}]
    lion = distlion.Lion(groups, lr=1.0)
    for param in params:
        lion.state[param]["exp_avg"].fill_(1.0)
        param.grad = torch.tensor([-1.0])

    lion.step()

    assert [param.item() for param in params] == [0.0, -1.0]


def test_signs_that_agree_count_where_the_product_of_direction_and_gradient_underflows() -> None:
    param, lion = make_lion(cautious=True)
    lion.state[param]["exp_avg"].zero_()
    param.grad = torch.full((3,), 1e-30)

    lion.step()

    assert param.tolist() == [0.5] * 3


@pytest.mark.parametrize("worth", [float("nan"), float("inf")])
def test_a_mask_does_not_hide_a_gradient_that_is_not_finite(worth: float) -> None:
    param = nn.Parameter(torch.zeros(3))
    cluster = distlion.VirtualCluster([param], workers=2, lr=1.0, cautious=True)
    param.grad = torch.tensor([1.0, worth, 1.0])

    with pytest.raises(errors.NonFiniteError):
        cluster.collect(0)


def test_cautious_must_be_true_or_false() -> None:
    with pytest.raises(errors.UnsupportedTypeError, match=r"cautious=1: expected True or False"):
        distlion.Lion([nn.Parameter(torch.zeros(1))], cautious=1)  # type: ignore[arg-type]


def test_a_state_without_the_key_keeps_the_present_choice_and_one_with_it_brings_its_own() -> None:
    _, bold = make_lion()
    _, cautious = make_lion(cautious=True)
    saved, old = cautious.state_dict(), bold.state_dict()
    del old["param_groups"][0]["cautious"]

    cautious.load_state_dict(old)
    bold.load_state_dict(saved)

    assert cautious.param_groups[0]["cautious"] is True
    assert bold.param_groups[0]["cautious"] is True
