import math

import numpy as np
import pytest
import torch

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion_lab.baselines.base import CompressionStep
from distlion_lab.baselines.dgc import DeepGradientCompression
from distlion_lab.baselines.sparse import SparsePayload
from distlion_lab.baselines.worker import Worker

SCALAR = torch.zeros(())


class Oracle:
    """One worker by the paper's Algorithm 4, entry by entry."""

    def __init__(self, n, momentum, clip_norm, n_workers):
        self.u, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.momentum = np.float32(momentum)
        self.bound = math.inf if clip_norm is None else clip_norm * math.sqrt(n_workers)

    def send(self, grad, kept):
        norm = math.sqrt(np.sum(np.float64(grad) ** 2))
        if norm > self.bound:
            grad = grad * np.float32(self.bound / norm)
        self.u = self.momentum * self.u + grad
        self.v = self.v + self.u
        sent = np.zeros_like(self.v)
        for j in np.argsort(-np.abs(self.v))[:kept]:
            sent[j] = self.v[j]
            self.u[j] = self.v[j] = 0
        return sent


def draw(n, *seed):
    """Integers, so that the sum of their squares is exact in any order; scaled by 2^-10."""
    values = np.random.default_rng(seed).integers(-5000, 5000, n).astype(np.float32)
    return values / np.float32(1024)


@pytest.mark.parametrize("n", [1, 2, 127, 1009])
@pytest.mark.parametrize("clip_norm", [None, 1.0, 1e6])
def test_method_follows_the_oracle_over_steps(n, clip_norm):
    method = DeepGradientCompression(keep=0.04, momentum=0.75, clip_norm=clip_norm, warmup_steps=8)
    workers = [Worker(method, rank=rank, n_workers=3, seed=0) for rank in range(3)]
    oracles = [Oracle(n, 0.75, clip_norm, 3) for _ in range(3)]
    for step in range(12):
        grads = [draw(n, step, rank) for rank in range(3)]
        payloads = [
            worker.compress(0, torch.from_numpy(grad), step=step, scalar=SCALAR)
            for worker, grad in zip(workers, grads, strict=True)
        ]
        # Quarters of 8 steps are 2 each: 1/4, 1/16, then 1/64 and 1/256 are below 0.04.
        fraction = {0: 0.25, 1: 0.25, 2: 0.0625, 3: 0.0625}.get(step, 0.04)
        kept = max(1, round(fraction * n))
        sent = [oracle.send(grad, kept) for oracle, grad in zip(oracles, grads, strict=True)]
        expected = (sent[0] + sent[1] + sent[2]) / np.float32(3)
        assert np.array_equal(method.aggregate(payloads, n).numpy(), expected)
        assert all(payload.n_bytes == 8 * kept for payload in payloads)


def test_sent_entries_are_masked_in_velocity_and_accumulation():
    method = DeepGradientCompression(keep=0.5, clip_norm=None)
    grad = torch.tensor([4.0, -1.0, -3.0, 2.0])
    _, state = method.compress(
        grad,
        method.create_state(4, grad.device),
        CompressionStep(0, 1, torch.Generator(), SCALAR),
    )
    assert state["velocity"].tolist() == [0.0, -1.0, 0.0, 2.0]
    assert state["accumulated"].tolist() == [0.0, -1.0, 0.0, 2.0]


def test_entries_that_are_always_sent_have_no_momentum():
    method = DeepGradientCompression(keep=1.0, clip_norm=None)
    worker = Worker(method, rank=0, n_workers=1, seed=0)
    for step in range(3):
        grad = torch.from_numpy(draw(100, step))
        payload = worker.compress(0, grad, step=step, scalar=SCALAR)
        assert torch.equal(method.aggregate([payload], 100), grad)


def test_sparsity_rises_as_in_the_paper():
    method = DeepGradientCompression(keep=0.001, warmup_steps=8)
    sparsities = [1 - method.kept_fraction(step) for step in range(0, 10, 2)]
    assert sparsities == pytest.approx([0.75, 0.9375, 0.984375, 0.99609375, 0.999])


def test_warm_up_shorter_than_its_stages_still_ends():
    method = DeepGradientCompression(keep=0.001, warmup_steps=3)
    assert [method.kept_fraction(step) for step in range(4)] == [1 / 4, 1 / 16, 1 / 64, 0.001]


def test_mean_of_independent_gradients_is_clipped_at_the_norm():
    """Four orthogonal gradients of equal length; their mean is half as long as each of them."""
    method = DeepGradientCompression(keep=1.0, clip_norm=2.0)
    for length, expected in ((3.0, 1.5), (4.0, 2.0), (100.0, 2.0)):
        payloads = [
            Worker(method, rank=rank, n_workers=4, seed=0).compress(
                0, length * torch.eye(4)[rank], step=0, scalar=SCALAR
            )
            for rank in range(4)
        ]
        assert float(method.aggregate(payloads, 4).norm()) == pytest.approx(expected)


def test_reply_holds_the_union_of_the_indices():
    method = DeepGradientCompression(keep=0.25, clip_norm=None)
    grads = [torch.tensor([8.0, 7, 0, 0, 0, 0, 0, 1]), torch.tensor([0.0, 7, 8, 0, 0, 0, 0, 1])]
    payloads = [
        Worker(method, rank=rank, n_workers=2, seed=0).compress(0, grad, step=0, scalar=SCALAR)
        for rank, grad in enumerate(grads)
    ]
    assert [payload.indices.tolist() for payload in payloads] == [[0, 1], [1, 2]]
    assert method.reply_bytes(payloads, 8) == 8 * 3


def test_parameter_too_long_for_its_indices_is_refused():
    long = torch.zeros(1).expand(2**31 + 1)
    with pytest.raises(UnsupportedTypeError, match="2147483649 elements"):
        SparsePayload.pick(long, torch.tensor([0]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", 0.0),
        ("keep", 1.5),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", math.nan),
        ("clip_norm", 0.0),
        ("clip_norm", math.inf),
        ("warmup_steps", -1),
    ],
)
def test_number_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        DeepGradientCompression(**{name: value})


@pytest.mark.parametrize("value", [2.0, True])
def test_warm_up_that_is_not_an_integer_is_refused(value):
    with pytest.raises(UnsupportedTypeError, match="warmup_steps"):
        DeepGradientCompression(warmup_steps=value)
