import math

import numpy as np
import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.base import CompressionStep
from distlion_lab.baselines.graddrop import MIN_SAMPLE_ELEMENTS, GradDrop
from distlion_lab.baselines.worker import Worker

SCALAR = torch.zeros(())


class Oracle:
    """One worker by the paper's Algorithm 1, with the exact threshold."""

    def __init__(self, n, keep):
        self.residual = np.zeros(n, np.float32)
        self.kept = max(1, round(keep * n))

    def send(self, grad):
        total = grad + self.residual
        threshold = np.sort(np.abs(total))[-self.kept]
        sent = np.where(np.abs(total) >= threshold, total, np.float32(0))
        self.residual = total - sent
        return sent


def draw(n, *seed):
    return np.random.default_rng(seed).standard_normal(n, np.float32)


@pytest.mark.parametrize("n", [1, 2, 127, 997])
@pytest.mark.parametrize("keep", [0.04, 0.5, 1.0])
def test_method_follows_the_oracle_over_steps(n, keep):
    method, n_workers = GradDrop(keep=keep), 3
    workers = [Worker(method, rank=rank, n_workers=3, seed=0) for rank in range(n_workers)]
    oracles = [Oracle(n, keep) for _ in range(n_workers)]
    for step in range(8):
        grads = [draw(n, step, rank) for rank in range(n_workers)]
        payloads = [
            worker.compress(0, torch.from_numpy(grad), step=step, scalar=SCALAR)
            for worker, grad in zip(workers, grads, strict=True)
        ]
        sent = [oracle.send(grad) for oracle, grad in zip(oracles, grads, strict=True)]
        expected = (sent[0] + sent[1] + sent[2]) / np.float32(3)
        assert np.array_equal(method.aggregate(payloads, n).numpy(), expected)


def test_what_is_dropped_is_sent_later_and_nothing_is_lost():
    # Integers, whose sums are exact.
    method, n, sent = GradDrop(keep=0.1), 200, torch.zeros(200)
    state = method.create_state(n, torch.device("cpu"))
    total = torch.zeros(n)
    for step in range(20):
        grad = torch.from_numpy(np.rint(8 * draw(n, step)))
        total += grad
        payload, state = method.compress(
            grad, state, CompressionStep(step, 1, torch.Generator(), SCALAR)
        )
        sent += method.aggregate([payload], n)
    assert state["residual"].count_nonzero() > 0
    assert torch.equal(sent + state["residual"], total)


def test_threshold_of_a_long_parameter_comes_from_a_sample():
    # 1,000 of the entries: the kept fraction has a standard deviation of
    # sqrt(0.04 * 0.96 / 1000) = 0.0062; six of them are 0.0372.
    n = 200_000
    worker = Worker(GradDrop(), rank=0, n_workers=1, seed=0)
    fractions = [
        worker.compress(index, torch.from_numpy(draw(n, index)), step=0, scalar=SCALAR).n_bytes
        / (8 * n)
        for index in range(4)
    ]
    assert all(abs(fraction - 0.04) < 0.0372 for fraction in fractions)
    assert len(set(fractions)) == 4  # an exact threshold would keep 0.04 of each


def test_parameter_of_the_least_sample_is_looked_at_whole():
    worker = Worker(GradDrop(), rank=0, n_workers=1, seed=0)
    grad = torch.from_numpy(draw(MIN_SAMPLE_ELEMENTS))
    assert worker.compress(0, grad, step=0, scalar=SCALAR).n_bytes == 8 * 40


def test_zeros_are_never_sent():
    grad = torch.zeros(100)
    worker = Worker(GradDrop(keep=0.5), rank=0, n_workers=1, seed=0)
    assert worker.compress(0, grad, step=0, scalar=SCALAR).n_bytes == 0
    grad[[3, 7]] = torch.tensor([1.0, -2.0])
    payload = worker.compress(0, grad, step=1, scalar=SCALAR)
    assert payload.indices.tolist() == [3, 7]
    assert payload.values.tolist() == [1.0, -2.0]


def test_reply_holds_the_union_of_the_indices_and_is_never_longer_than_dense():
    method = GradDrop(keep=1.0)
    workers = [Worker(method, rank=rank, n_workers=2, seed=0) for rank in range(2)]
    first, second = torch.zeros(100), torch.zeros(100)
    first[:20], second[15:30] = 1.0, 1.0
    payloads = [
        worker.compress(0, grad, step=0, scalar=SCALAR)
        for worker, grad in zip(workers, [first, second], strict=True)
    ]
    assert [method.uplink_bytes(payload) for payload in payloads] == [160, 120]
    assert method.reply_bytes(payloads, 100) == 8 * 30
    assert method.reply_bytes(payloads, 30) == 4 * 30


@pytest.mark.parametrize("name", ["keep", "sample"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, math.nan])
def test_fraction_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        GradDrop(**{name: value})
