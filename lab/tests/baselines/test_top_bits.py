"""The message of SparseLoCo beside a plain loop in numpy, and its bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.top_bits import TopBits
from distlion_lab.baselines.worker import Worker
from distlion_lab.training.methods import find_method
from distlion_lab.training.workers import MethodRun
from drawn import make_params

BLOCK = 4096
# Means of a few hundred float32 numbers, in another order.
TOLERANCE = 1e-5
NOTHING = torch.zeros(())


def compress_in_numpy(values: np.ndarray) -> np.ndarray:
    """Return what the largest 1/64 of each block stand for, and 0 elsewhere."""
    chosen = []
    for begin in range(0, len(values), BLOCK):
        block = np.abs(values[begin : begin + BLOCK])
        kept = max(1, round(len(block) / 64))
        chosen += [begin + place for place in np.argsort(block)[-kept:]]
    magnitudes = np.abs(values[chosen])
    is_large = magnitudes > magnitudes.mean()
    sent = np.zeros_like(values)
    for group in (is_large, ~is_large):
        if group.any():
            places = np.array(chosen)[group]
            sent[places] = np.sign(values[places]) * magnitudes[group].mean()
    return sent


@pytest.mark.parametrize("n", [1, 63, 200, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_what_is_not_sent_is_kept_and_decays(n: int) -> None:
    worker = Worker(TopBits(), rank=0, n_workers=1, seed=0)
    random, residual = np.random.default_rng(n), np.zeros(n)
    for step in range(4):
        delta = random.normal(size=n)
        residual = 0.95 * residual + delta
        expected = compress_in_numpy(residual)
        residual = residual - expected
        payload = worker.compress(0, torch.tensor(delta).float(), step=step, scalar=NOTHING)
        found = TopBits().aggregate([payload], n).numpy()
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_a_payload_takes_14_bits_an_element_and_two_scales() -> None:
    worker = Worker(TopBits(), rank=0, n_workers=1, seed=0)
    payload = worker.compress(0, torch.randn(2 * BLOCK + 640), step=0, scalar=NOTHING)
    n_sent = 64 + 64 + 10
    assert payload.n_bytes == payload.to_wire().numel() == 8 + math.ceil(14 * n_sent / 8)


def test_the_mean_is_that_of_all_workers() -> None:
    deltas = [torch.randn(700, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    payloads = [
        Worker(TopBits(), rank=rank, n_workers=3, seed=0).compress(0, d, step=0, scalar=NOTHING)
        for rank, d in enumerate(deltas)
    ]
    expected = np.mean([compress_in_numpy(each.double().numpy()) for each in deltas], axis=0)
    np.testing.assert_allclose(TopBits().aggregate(payloads, 700), expected, atol=TOLERANCE)


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a number from 0 to 1"):
        TopBits(decay=decay)


def test_local_steps_move_by_the_mean_of_what_is_sent() -> None:
    """Two periods of two steps of SGD-like AdamW: the anchor is that of a loop in numpy."""
    params = make_params({"w": (30, 20)})
    (param,) = params.values()
    run = MethodRun(list(params.items()), lr=0.01, weight_decay=0.0, workers=3, steps=4, seed=0)
    method = find_method("sparse-2").enter(run)
    anchor = param.detach().double().numpy().copy().ravel()
    locals_ = [torch.nn.Parameter(param.detach().clone()) for _ in range(3)]
    inners = [torch.optim.AdamW([each], 0.01, weight_decay=0.0) for each in locals_]
    residuals = [np.zeros(600) for _ in range(3)]
    random = torch.Generator().manual_seed(1)
    for step in range(4):
        for worker in range(3):
            grad = torch.randn(30, 20, generator=random)
            param.grad, locals_[worker].grad = grad.clone(), grad
            method.collect(worker)
            inners[worker].step()
        method.step()
        if step % 2:
            sent = []
            for worker, mine in enumerate(locals_):
                total = 0.95 * residuals[worker] + anchor - mine.detach().double().numpy().ravel()
                sent.append(compress_in_numpy(total))
                residuals[worker] = total - sent[-1]
            anchor = anchor - np.mean(sent, axis=0)
            for mine in locals_:
                mine.data.copy_(torch.tensor(anchor).view(30, 20))
    np.testing.assert_allclose(param.detach().numpy().ravel(), anchor, atol=TOLERANCE)
    n_sent = round(600 / 64)
    assert method.up_bits_per_parameter == pytest.approx(
        8 * (8 + math.ceil(14 * n_sent / 8)) / 600 / 2
    )
    assert method.sent_bytes == 2 * 2 * (8 + math.ceil(14 * n_sent / 8))
