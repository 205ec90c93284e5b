"""Local steps between exchanges: DiLoCo beside a plain simulation in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distlion.errors import InvalidArgumentError, NonFiniteError
from distlion_lab.baselines.ring import ring_all_reduce_bytes
from distlion_lab.training.method import MethodKind
from distlion_lab.training.methods import find_method
from plain_local_steps import (
    N_ELEMENTS,
    STEPS,
    TOLERANCE,
    WORKERS,
    average_in_numpy,
    make_params,
    make_run,
    simulate,
    take_steps,
)

NAMES = (
    "diloco-8",
    "diloco-8-plain",
    "diloco-8-lion",
    "scaled-every-8",
    "scaled-every-8-lion-plain",
)


def enter(name, params, **sizes):
    return find_method(name).enter(make_run(params, **sizes))


@pytest.mark.parametrize(
    ("name", "agree"),
    [("diloco-2", average_in_numpy)],
)
def test_every_step_is_that_of_a_plain_simulation(name, agree):
    params = make_params()
    method = enter(name, params)
    for step, expected in enumerate(simulate(agree, STEPS)):
        take_steps(method, params, 1, begin=step)
        for each, param in params:
            np.testing.assert_allclose(param.detach().numpy(), expected[each], atol=TOLERANCE)


def test_plain_means_are_averages_of_parameters():
    params = make_params()
    take_steps(enter("diloco-2-plain", params), params, STEPS)
    expected = simulate(average_in_numpy, STEPS, outer_lr=1.0, outer_momentum=0.0)[-1]
    for each, param in params:
        np.testing.assert_allclose(param.detach().numpy(), expected[each], atol=TOLERANCE)


def test_a_run_ends_in_an_exchange_whatever_its_length():
    params = make_params()
    take_steps(enter("diloco-2", params, steps=5), params, 5)
    expected = simulate(average_in_numpy, 5)[-1]
    for each, param in params:
        np.testing.assert_allclose(param.detach().numpy(), expected[each], atol=TOLERANCE)


def test_all_workers_take_the_rate_that_a_schedule_sets():
    params = make_params()
    before = [param.detach().clone() for _, param in params]
    method = enter("diloco-2", params)
    for group in method.optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(method, params, 2)
    assert all(torch.equal(param, old) for (_, param), old in zip(params, before, strict=True))


# Bytes


def test_mean_of_deltas_sends_32_bits_every_k_steps():
    params = make_params()
    method = enter("diloco-3", params)
    take_steps(method, params, STEPS)
    assert method.up_bits_per_parameter == method.down_bits_per_parameter == 32 / 3
    assert method.sent_bytes == 2 * ring_all_reduce_bytes(4 * N_ELEMENTS, WORKERS, element_bytes=1)


def test_bits_of_a_run_count_its_last_exchange():
    params = make_params()
    method = enter("diloco-4", params)
    take_steps(method, params, STEPS)
    assert method.up_bits_per_parameter == pytest.approx(2 * 32 / STEPS)


# Refusals


@pytest.mark.parametrize("name", ["diloco-0", "scaled-every-", "majority-every-8", "diloco-8-sgd"])
def test_a_name_that_is_none_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidArgumentError, match="diloco-K"):
        find_method(name)


def test_a_name_says_on_which_side_a_method_is():
    assert find_method("diloco-8").kind is MethodKind.BASELINE
    assert find_method("residual-2-every-8").kind is MethodKind.OURS
    assert "bits=2" in find_method("residual-2-every-8-lion").definition


def test_only_the_means_with_both_optimizers_of_diloco_are_called_so():
    described = {name: find_method(name).description for name in NAMES}
    assert [name for name, words in described.items() if "DiLoCo" in words] == ["diloco-8"]
    assert len({find_method(name).definition for name in NAMES}) == len(NAMES)


def test_workers_come_in_order():
    params = make_params()
    method = enter("diloco-2", params)
    with pytest.raises(InvalidArgumentError, match="expected worker 0"):
        method.collect(1)
    with pytest.raises(InvalidArgumentError, match="after 0 of 3"):
        method.step()


@pytest.mark.parametrize("name", ["diloco-1", "scaled-every-1"])
def test_parameters_that_are_not_finite_end_the_run(name):
    params = make_params()
    method = enter(name, params)
    params[0][1].grad = torch.full_like(params[0][1], torch.nan)
    for worker in range(WORKERS):
        method.collect(worker)
    with pytest.raises(NonFiniteError):
        method.step()
