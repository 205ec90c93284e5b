"""Majority votes that differ in one thing do differ in it, and in nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

LR, STEPS = 0.01, 100


def build(study: Any, model: nn.Module, variant: Any = None, *, workers: int = 1) -> Any:
    """Build a variant, or the majority vote of the library."""
    run = study.methods.Run(lr=LR, workers=workers, steps=STEPS, seed=0)
    if variant is None:
        return study.methods.build_method("majority-betas-90-95", model, run)
    return study.variants.VariantVote(list(model.parameters()), run, variant)


def make_model(*values: float) -> nn.Module:
    """Return a parameter of two elements for each value."""
    return nn.ParameterList([nn.Parameter(torch.full((1, 2), value)) for value in values])


def step_with(method: Any, params: list[nn.Parameter], *grads: float) -> list[float]:
    """Do a step of one worker at the highest rate; return how far each parameter moved."""
    before = [param.detach().clone() for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.full_like(param, grad)
    method.collect(0)
    method.step()
    return [float((param.detach() - old).mean()) for param, old in zip(params, before, strict=True)]


def test_without_a_difference_it_is_distributed_lion(study: Any) -> None:
    ends = []
    grads = np.random.default_rng(0).normal(size=(6, 3, 4, 5)).astype(np.float32)
    for variant in (None, study.variants.Variant()):
        torch.manual_seed(0)
        model = nn.Linear(5, 4, bias=False)
        method = build(study, model, variant, workers=3)
        for step in grads:
            for worker, grad in enumerate(step):
                model.weight.grad = torch.from_numpy(grad.copy())
                method.collect(worker)
            method.step()
        ends.append(model.weight.detach().numpy())
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)


def test_signs_are_drawn_by_the_size_of_an_element(study: Any) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(20_000))])
    (param,) = model.parameters()
    method = build(study, model, study.variants.VARIANTS["majority-stochastic-sign-betas-90-95"])
    param.grad = torch.ones_like(param)
    method.collect(0)
    method.step()
    # u reaches 2 mean abs(c), and c is its mean: plus with probability (1 + 1 / 2) / 2.
    assert float((param < 0).float().mean()) == pytest.approx(0.75, abs=0.02)


def test_steps_of_tensors_are_as_long_as_votes_were_large(study: Any) -> None:
    model = make_model(0.0, 0.0)
    method = build(study, model, study.variants.VARIANTS["majority-tensor-scale-betas-90-95"])
    assert step_with(method, list(model), 1.0, -3.0) == pytest.approx([-0.5 * LR, 1.5 * LR])
    # Sizes are those of this step alone: 0.9 m, and 0.9 m + 0.1 g.
    moved = step_with(method, list(model), 0.0, -27.0)
    assert moved[0] == pytest.approx(-LR * 0.045 / ((0.045 + 2.835) / 2), rel=0.01)


def test_steps_of_matrices_are_as_long_as_their_weights(study: Any) -> None:
    model = make_model(1.0, 3.0)
    model.append(nn.Parameter(torch.zeros(4)))
    variant = study.variants.Variant(scale="weights", decay=0.0)
    moved = step_with(build(study, model, variant), list(model), 1.0, 1.0, 1.0)
    assert moved == pytest.approx([-0.5 * LR, -1.5 * LR, -LR], rel=1e-4)


@pytest.mark.parametrize(("name", "times"), [("decay-0", 0), ("decay-4", 4)])
def test_weights_decay_more_or_not_at_all(study: Any, name: str, times: int) -> None:
    model = make_model(2.0)
    method = build(study, model, study.variants.VARIANTS[f"majority-{name}-betas-90-95"])
    (moved,) = step_with(method, list(model), 1.0)
    assert moved + LR == pytest.approx(-2.0 * times * 1e-4, abs=1e-6)


def test_shorter_warm_up_is_at_the_highest_rate_after_a_twentieth(study: Any) -> None:
    rates = []
    model = make_model(0.0)
    method = build(study, model, study.variants.VARIANTS["majority-warm-up-5-betas-90-95"])
    for step in range(STEPS):
        (group,) = method.optimizer.param_groups
        group["lr"] = LR * study.schedule.rate_factor(step, STEPS)
        rates.append(-step_with(method, list(model), 1.0)[0] / LR)
        model[0].data.zero_()
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 95 / 96], abs=1e-5)
    assert rates[-1] == pytest.approx(1 / 96, abs=1e-5)


def test_momenta_are_rounded(study: Any) -> None:
    model = make_model(0.0)
    method = build(study, model, study.variants.VARIANTS["majority-momentum-bf16-betas-90-95"])
    step_with(method, list(model), 1.0)
    ((momentum,),) = method._momenta
    assert momentum.dtype == torch.bfloat16
    assert float(momentum[0, 0]) != pytest.approx(0.05, rel=1e-5)
    assert float(momentum[0, 0]) == pytest.approx(0.05, rel=2**-8)


def test_short_momenta_before_the_vote_and_a_shared_one_behind_it(study: Any) -> None:
    model = make_model(0.0)
    method = build(study, model, study.variants.VARIANTS["majority-local-50-shared-90"])
    grads = np.random.default_rng(1).normal(size=8)
    m = x = y = 0.0
    for grad in grads:
        step_with(method, list(model), float(grad))
        m = 0.5 * m + 0.5 * grad
        y = 0.9 * y + 0.1 * np.sign(m)
        x = (1 - 1e-4) * x - LR * y
    assert model[0].tolist()[0] == pytest.approx([x, x], abs=1e-7)
    assert len(set(np.sign(grads))) == 2


def test_what_is_screened_ends_with_its_tuning(study: Any) -> None:
    (part,) = (part for part in study.plan.PARTS if part.name == "screen")
    assert {cell.method for cell in part.cells} == set(study.variants.VARIANTS)
    cell = part.cells[0]
    kin = cell
    ends = [(cell, 5e-4, 2.2), (cell, 1e-3, 2.3), (cell, 2e-3, 1.9)]
    while (kin := kin.centered_on) is not None:
        ends += [(kin, 5e-4, 2.2), (kin, 1e-3, 2.1), (kin, 2e-3, 2.2)]
    found = {
        tuned.tuning(rate).name: {"diverged": None, "validation": [[1, loss, 0.5]]}
        for tuned, rate, loss in ends
    }
    assert study.cells.list_open(cell, found.get) == [cell.tuning(4e-3)]
    assert not study.evidence.Ending.find(cell, found.get).is_whole
    found[cell.tuning(4e-3).name] = {"diverged": None, "validation": [[1, 2.4, 0.5]]}
    assert study.cells.list_open(cell, found.get) == []
    ending = study.evidence.Ending.find(cell, found.get)
    assert (ending.is_whole, ending.choice.rate, ending.validation_loss) == (True, 2e-3, 1.9)
