"""Votes on the deltas of local steps, scaled beside the rule: a plain simulation in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distlion_lab.training.methods import find_method
from plain_local_steps import (
    DECAY,
    LR,
    N_ELEMENTS,
    SHAPES,
    STEPS,
    TOLERANCE,
    WORKERS,
    draw_target,
    make_params,
    make_run,
    simulate,
    take_steps,
    vote_in_numpy,
)
from programs import BENCHMARKS, imported_modules

with imported_modules(BENCHMARKS / "study", "scaled_votes") as (scaled_votes,):
    build_scaled = scaled_votes.build_scaled


def enter(name, params):
    run = make_run(params)
    return build_scaled(name, run) or find_method(name).enter(run)


def test_every_step_is_that_of_a_plain_simulation():
    params = make_params()
    method = enter("majority-every-2", params)
    for step, expected in enumerate(simulate(vote_in_numpy, STEPS)):
        take_steps(method, params, 1, begin=step)
        for each, param in params:
            np.testing.assert_allclose(param.detach().numpy(), expected[each], atol=TOLERANCE)


def test_lion_inside_takes_lions_step_on_every_worker():
    params = make_params()
    before = [param.detach().clone() for _, param in params]
    take_steps(enter("majority-every-2-lion", params), params, 1)
    for (name, param), old in zip(params, before, strict=True):
        sign = torch.tensor(np.sign(old.numpy() - draw_target(0, 0, name)))
        torch.testing.assert_close(
            param.detach(), old * (1 - LR * DECAY) - LR * sign.float(), rtol=0, atol=TOLERANCE
        )


def test_votes_send_a_bit_and_a_scale_a_tensor_every_k_steps():
    params = make_params()
    method = enter("majority-every-3", params)
    take_steps(method, params, STEPS)
    expected = (1 + len(SHAPES) * 32 / N_ELEMENTS) / 3
    assert method.up_bits_per_parameter == pytest.approx(expected)
    assert method.down_bits_per_parameter == pytest.approx(expected)


def test_votes_of_an_exchange_send_what_a_step_of_votes_sends_and_scales():
    params, others = make_params(), make_params()
    method, majority = enter("majority-every-2", params), enter("majority", others)
    take_steps(method, params, 2)
    take_steps(majority, others, 1)
    assert method.sent_bytes - majority.sent_bytes == 4 * len(SHAPES) * (WORKERS - 1)
    assert method.rounds == majority.rounds


def test_nothing_is_sent_before_the_first_exchange():
    params = make_params()
    method = enter("majority-every-4", params)
    take_steps(method, params, 3)
    assert method.sent_bytes == 0
    assert method.up_bits_per_parameter == 0


def test_other_names_are_left_to_comparisons():
    run = make_run(make_params())
    assert all(build_scaled(name, run) is None for name in ("scaled-every-8", "diloco-8"))
