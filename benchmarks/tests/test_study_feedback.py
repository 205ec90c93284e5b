"""Votes with error feedback: their equations, and that they move by the mean where votes do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

LR, STEPS = 0.01, 40
BETAS = (0.9, 0.99)
# Three workers, of whom one wants more than the two others together.
DIVIDED = (3.0, -1.0, -1.0)


def build(study: Any, name: str, *params: nn.Parameter, workers: int = 3) -> Any:
    run = study.methods.Run(lr=LR, workers=workers, steps=STEPS, seed=0)
    return study.methods.build_method(name, nn.ParameterList(params), run)


def take_step(method: Any, param: nn.Parameter, grads: Any) -> None:
    for worker, grad in enumerate(grads):
        param.grad = torch.as_tensor(grad, dtype=torch.float32).expand_as(param).clone()
        method.collect(worker)
    method.step()


def test_it_computes_its_equations(study: Any) -> None:
    drawn = np.random.default_rng(0).normal(size=(STEPS, 3, 5))
    param = nn.Parameter(torch.zeros(5))
    method = build(study, "feedback", param)
    x, momenta, said = np.zeros(5), np.zeros((3, 5)), np.zeros((3, 5))
    kept = 1 - study.schedule.DECAY_PER_STEP
    for grads in drawn:
        take_step(method, param, grads)
        rest = BETAS[0] * momenta + (1 - BETAS[0]) * grads - said
        momenta = BETAS[1] * momenta + (1 - BETAS[1]) * grads
        said += np.sign(rest) * np.abs(rest).mean(axis=1, keepdims=True)
        x = kept * x - LR * np.sign(said.sum(axis=0))
    assert param.detach().numpy() == pytest.approx(x, abs=1e-5)


@pytest.mark.parametrize(("name", "way"), [("feedback", -1), ("majority", 1)])
def test_one_who_wants_much_outweighs_two_who_want_little(study: Any, name: str, way: int) -> None:
    param = nn.Parameter(torch.zeros(4))
    method = build(study, name, param)
    for _ in range(STEPS):
        take_step(method, param, DIVIDED)
    assert (param.detach().sign() == way).all()


def test_two_bits_say_which_elements_are_large(study: Any) -> None:
    param = nn.Parameter(torch.zeros(4))
    method = build(study, "feedback-2", param, workers=1)
    take_step(method, param, [torch.tensor([1.0, -2.0, 6.0, -7.0])])
    # Sizes of c are a tenth of those of g, and their mean is 0.4.
    said = [0.15, -0.15, 0.65, -0.65]
    assert method._said[0][0].tolist() == pytest.approx(said)
    assert method._sums[0].tolist() == pytest.approx(said)


def test_two_bits_of_equal_elements_say_their_size(study: Any) -> None:
    param = nn.Parameter(torch.zeros(4))
    method = build(study, "feedback-2", param, workers=1)
    take_step(method, param, (-3.0,))
    assert method._said[0][0].tolist() == pytest.approx([-0.3] * 4)


def test_betas_are_those_of_the_name(study: Any) -> None:
    ends = []
    for name in ("feedback", "feedback-betas-90-99", "feedback-betas-90-95"):
        drawn = np.random.default_rng(0).normal(size=(STEPS, 3, 50))
        param = nn.Parameter(torch.zeros(50))
        method = build(study, name, param)
        for grads in drawn:
            take_step(method, param, grads)
        ends.append(param.detach())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_workers_do_not_move_what_has_no_gradient_but_by_coins(study: Any) -> None:
    param = nn.Parameter(torch.zeros(10_000))
    take_step(build(study, "feedback", param), param, (0.0, 0.0, 0.0))
    # Nothing is 0 apart or in sum but by coins, of which half fall on either side.
    assert float((param > 0).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_a_bit_and_a_number_a_tensor_are_sent_and_a_bit_comes_back(study: Any) -> None:
    params = [nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(192))]
    method = build(study, "feedback", *params)
    assert method.up_bits_per_parameter == 1 + 2 * 32 / 256
    assert method.down_bits_per_parameter == 1
    assert build(study, "feedback-2", *params).up_bits_per_parameter == 2 + 2 * 2 * 32 / 256


@pytest.mark.parametrize("name", ["feedback", "feedback-2-betas-90-95"])
def test_the_rule_of_the_library_goes_where_the_loop_goes(study: Any, name: str) -> None:
    """Nothing here is exactly 0, so that no coin is drawn; rounding flips no sign."""
    ends = []
    library = name.replace("feedback", "feedback-1", 1) if name == "feedback" else name
    for each in (name, f"library-{library}"):
        drawn = np.random.default_rng(1).normal(size=(STEPS, 3, 300))
        param = nn.Parameter(torch.zeros(300))
        method = build(study, each, param)
        for grads in drawn:
            take_step(method, param, grads)
        ends.append(param.detach())
    assert ends[0].abs().max() > LR
    assert torch.allclose(*ends, atol=1e-6)
