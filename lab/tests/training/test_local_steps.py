"""Local steps between exchanges: DiLoCo and scaled votes beside a plain simulation in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import drawn
from distlion.errors import InvalidArgumentError, NonFiniteError
from distlion_lab.baselines import ring_all_reduce_bytes
from distlion_lab.training.methods import MethodKind, find_method
from distlion_lab.training.workers import MethodRun

WORKERS, EVERY, STEPS, LR, DECAY = 3, 2, 6, 0.01, 0.1
SHAPES = {"a": (4, 5), "b": (7,)}
N_ELEMENTS = 27
# A few dozen float32 operations on values of about 1.
TOLERANCE = 1e-6
NAMES = (
    "diloco-8",
    "diloco-8-plain",
    "diloco-8-lion",
    "majority-every-8",
    "majority-every-8-lion-plain",
)


def make_params():
    return list(drawn.make_params(SHAPES).items())


def enter(name, params, *, workers=WORKERS, steps=STEPS):
    run = MethodRun(params, lr=LR, weight_decay=DECAY, workers=workers, steps=steps, seed=0)
    return find_method(name).enter(run)


def draw_target(step, worker, name):
    """Draw what a worker's loss, half the squared distance to it, pulls towards."""
    seed = 1000 * step + 10 * worker + (name == "b")
    return np.random.default_rng(seed).normal(size=SHAPES[name])


def take_steps(method, params, steps, *, workers=WORKERS, begin=0):
    """Step on gradients that depend on the parameters that the method puts into the model."""
    for step in range(begin, begin + steps):
        for worker in range(workers):
            for name, param in params:
                target = torch.tensor(draw_target(step, worker, name), dtype=torch.float32)
                param.grad = param.detach() - target
            method.collect(worker)
        method.step()


def average_in_numpy(deltas):
    return sum(deltas) / len(deltas)


def vote_in_numpy(deltas):
    scale = np.mean([np.abs(delta).mean() for delta in deltas])
    return scale * np.sign(sum(np.sign(delta) for delta in deltas))


def simulate(agree, steps, *, outer_lr=0.7, outer_momentum=0.9):
    """Return the parameters after each step on worker 0, by the equations of the papers."""
    anchor = {name: p.detach().double().numpy().copy() for name, p in make_params()}
    local = [{n: x.copy() for n, x in anchor.items()} for _ in range(WORKERS)]
    first, second = (
        [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(WORKERS)] for _ in range(2)
    )
    momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    seen = []
    for step in range(steps):
        for worker in range(WORKERS):
            for name, x in local[worker].items():
                grad = x - draw_target(step, worker, name)
                m, v = first[worker][name], second[worker][name]
                m[:] = 0.9 * m + 0.1 * grad
                v[:] = 0.999 * v + 0.001 * grad**2
                m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                x[:] = (1 - LR * DECAY) * x - LR * m_hat / (np.sqrt(v_hat) + 1e-8)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            for name in SHAPES:
                delta = agree([anchor[name] - mine[name] for mine in local])
                momentum[name] = outer_momentum * momentum[name] + delta
                moved = outer_lr * (delta + outer_momentum * momentum[name])
                anchor[name] = anchor[name] - moved
                for mine in local:
                    mine[name] = anchor[name].copy()
        seen.append({name: x.copy() for name, x in local[0].items()})
    return seen


@pytest.mark.parametrize(
    ("name", "agree"),
    [("diloco-2", average_in_numpy), ("majority-every-2", vote_in_numpy)],
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


def test_lion_inside_takes_lions_step_on_every_worker():
    params = make_params()
    before = [param.detach().clone() for _, param in params]
    take_steps(enter("majority-every-2-lion", params), params, 1)
    for (name, param), old in zip(params, before, strict=True):
        sign = torch.tensor(np.sign(old.numpy() - draw_target(0, 0, name)))
        torch.testing.assert_close(
            param.detach(), old * (1 - LR * DECAY) - LR * sign.float(), rtol=0, atol=TOLERANCE
        )


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


def test_bits_of_a_run_count_its_last_exchange():
    params = make_params()
    method = enter("diloco-4", params)
    take_steps(method, params, STEPS)
    assert method.up_bits_per_parameter == pytest.approx(2 * 32 / STEPS)


# Refusals


@pytest.mark.parametrize("name", ["diloco-0", "majority-every-", "sum-every-8", "diloco-8-sgd"])
def test_a_name_that_is_none_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidArgumentError, match="diloco-K"):
        find_method(name)


def test_a_name_says_on_which_side_a_method_is():
    assert find_method("diloco-8").kind is MethodKind.BASELINE
    assert find_method("quantized-2-every-8").kind is MethodKind.OURS
    assert "bits=2" in find_method("quantized-2-every-8-lion").definition


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


@pytest.mark.parametrize("name", ["diloco-1", "majority-every-1"])
def test_parameters_that_are_not_finite_end_the_run(name):
    params = make_params()
    method = enter(name, params)
    params[0][1].grad = torch.full_like(params[0][1], torch.nan)
    for worker in range(WORKERS):
        method.collect(worker)
    with pytest.raises(NonFiniteError):
        method.step()
