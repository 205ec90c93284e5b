"""1-bit Adam as comparisons name it; the study's tests have its oracle."""

from __future__ import annotations

import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.one_bit_adam import OneBitAdam, compress_signs, count_step_bytes
from distlion_lab.training.methods import find_method
from distlion_lab.training.workers import MethodRun
from drawn import make_params, set_grads

SHAPES = {"a": (30, 7), "b": (13,)}


def take_steps(steps: int, *, lr: float = 0.01) -> tuple[object, dict[str, torch.nn.Parameter]]:
    params = make_params(SHAPES)
    run = MethodRun(list(params.items()), lr=lr, weight_decay=0.1, workers=4, steps=10, seed=0)
    method = find_method("one-bit-adam").enter(run)
    for step in range(steps):
        for worker in range(4):
            set_grads(params.values(), worker, step)
            method.collect(worker)
        method.step()
    return method, params


def test_two_of_ten_steps_are_those_of_adamw_on_the_mean() -> None:
    _, params = take_steps(2)
    others = make_params(SHAPES)
    adamw = torch.optim.AdamW(others.values(), 0.01, weight_decay=0.1)
    for step in range(2):
        grads = []
        for worker in range(4):
            set_grads(others.values(), worker, step)
            grads.append([param.grad for param in others.values()])
        for param, each in zip(others.values(), zip(*grads, strict=True), strict=True):
            param.grad = torch.stack(each).mean(0)
        adamw.step()
    for ours, theirs in zip(params.values(), others.values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_bytes_are_whole_numbers_while_it_warms_up_and_signs_afterwards() -> None:
    n_signs = (27 + 4) + (2 + 4)  # 210 and 13 bits, a scale each
    assert count_step_bytes(list(make_params(SHAPES).values())) == (4 * 223, n_signs)
    warm, signs = 2 * 3 * 4 * 223 // 4, 2 * 3 * n_signs // 4
    method, _ = take_steps(2)
    assert method.sent_bytes == 2 * warm
    method, _ = take_steps(5)
    assert method.sent_bytes == 2 * warm + 3 * signs
    share = (0.2 * 4 * 223 + 0.8 * n_signs) * 8 / 223
    assert method.up_bits_per_parameter == method.down_bits_per_parameter == pytest.approx(share)


def test_signs_have_the_norm_of_what_they_stand_for() -> None:
    values = torch.tensor([3.0, -1.0, 0.0, 0.5])
    sent = compress_signs(values)
    assert torch.equal(sent > 0, torch.tensor([True, False, True, True]))
    assert float(sent.norm()) == pytest.approx(float(values.norm()))


def test_no_worker_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="workers is 0"):
        OneBitAdam([torch.nn.Parameter(torch.zeros(2))], lr=0.1, decay=0.0, workers=0, steps=1)
