import math

import numpy as np
import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.base import CompressionStep
from distlion_lab.baselines.terngrad import TernGrad


def compress(grad, scalar, *, seed=0, method=None):
    payload, _ = (method or TernGrad()).compress(
        grad, {}, CompressionStep(0, 1, torch.Generator().manual_seed(seed), scalar)
    )
    return payload


def oracle_levels(grad, scale, draws, *, clip=2.5):
    bound = np.float32(min(np.abs(grad).max(), clip * np.sqrt(np.mean(np.float64(grad) ** 2))))
    clipped = np.clip(grad, -bound, bound)
    return np.sign(clipped) * (draws * scale < np.abs(clipped))


@pytest.mark.parametrize("n", [1, 3, 4, 1009])
def test_levels_follow_the_draws(n):
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor(3.0)
    draws = torch.rand(n, generator=torch.Generator().manual_seed(7)).numpy()
    levels = compress(grad, scale, seed=7).levels
    assert np.array_equal(levels.numpy(), oracle_levels(grad.numpy(), np.float32(3), draws))


def test_mean_over_workers_is_the_sum_of_levels_times_the_scale():
    grads = [torch.randn(1009, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    method, scale = TernGrad(), torch.tensor(4.5)
    payloads = [compress(grad, scale, seed=i) for i, grad in enumerate(grads)]
    total = sum(
        oracle_levels(
            grad.numpy(),
            np.float32(4.5),
            torch.rand(1009, generator=torch.Generator().manual_seed(i)).numpy(),
        )
        for i, grad in enumerate(grads)
    )
    expected = total.astype(np.float32) * (np.float32(4.5) / np.float32(3))
    assert np.array_equal(method.aggregate(payloads, 1009).numpy(), expected)


def test_mean_of_many_draws_is_the_clipped_gradient():
    # A draw lies in an interval of width s = 1, so that by Hoeffding's inequality the mean of K is
    # off by t or more with probability 2 exp(-2 K t^2); over n elements, 2 n times the exp. For
    # 1e-9, t = sqrt(ln(2 n / 1e-9) / (2 K)) = 0.0255. The granularity of 2^-24 is far below it.
    n, repeats = 100, 20_000
    bound = math.sqrt(math.log(2 * n / 1e-9) / (2 * repeats))
    # A uniform row reaches to 1.7 deviations: nothing is clipped.
    grad = torch.linspace(-1, 1, n)
    payload = compress(grad.repeat(repeats), torch.tensor(1.0))
    means = payload.levels.view(repeats, n).double().mean(dim=0)
    assert float((means - grad).abs().max()) < bound


def test_gradient_is_clipped_at_standard_deviations_about_zero():
    grad = torch.zeros(100)
    grad[3] = -10.0  # deviation 1
    assert TernGrad().measure(grad).item() == 2.5
    assert TernGrad(clip=20.0).measure(grad).item() == 10.0


def test_clipped_entry_is_always_sent_at_its_own_scale():
    grad = torch.zeros(100)
    grad[3] = -10.0
    for seed in range(20):
        assert compress(grad, TernGrad().measure(grad), seed=seed).levels[3] == -1


def test_odds_are_those_of_the_clipped_entry_at_the_scale_of_another_worker():
    grad = torch.zeros(100)
    grad[3] = -10.0  # clipped at 2.5
    scale = torch.tensor(5.0)
    for seed in range(20):
        draw = torch.rand(100, generator=torch.Generator().manual_seed(seed))[3]
        expected = -1 if 5.0 * draw < 2.5 else 0
        assert compress(grad, scale, seed=seed).levels[3] == expected


def test_codes_lie_four_to_a_byte_lowest_first():
    levels = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])
    # Deviation 0.9, so nothing is clipped; a draw below 1 always sends 1.
    payload = compress(levels, torch.tensor(1.0))
    assert payload.to_wire().tolist() == [0b10_01_00_10, 0b00]
    assert payload.levels.tolist() == [1, -1, 0, 1, -1]


@pytest.mark.parametrize(("n", "n_bytes"), [(1, 1), (4, 1), (5, 2), (1009, 253)])
def test_payload_has_two_bits_for_each_level(n, n_bytes):
    payload = compress(torch.ones(n), torch.tensor(1.0))
    assert payload.n_bytes == n_bytes
    assert TernGrad().uplink_bytes(payload) == n_bytes + 4


@pytest.mark.parametrize(
    ("n_workers", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (32, 7)]
)
def test_reply_has_room_for_every_sum(n_workers, bits):
    assert 2**bits >= 2 * n_workers + 1 > 2 ** (bits - 1)
    payloads = [compress(torch.ones(1009), torch.tensor(1.0))] * n_workers
    assert TernGrad().reply_bytes(payloads, 1009) == math.ceil(1009 * bits / 8) + 4


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_clip_out_of_range_is_refused(clip):
    with pytest.raises(InvalidArgumentError, match="clip"):
        TernGrad(clip=clip)
