import numpy as np
import torch

from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.worker import Worker

SCALAR = torch.zeros(())


def test_mean_adds_rounded_shares_in_rank_order():
    method, n = HalfPrecision(), 1009
    grads = [np.random.default_rng(rank).standard_normal(n, np.float32) for rank in range(3)]
    payloads = [
        Worker(method, rank=rank, n_workers=3, seed=0).compress(
            0, torch.from_numpy(grad), step=0, scalar=SCALAR
        )
        for rank, grad in enumerate(grads)
    ]
    shares = [grad.astype(np.float16) / np.float16(3) for grad in grads]
    expected = (shares[0] + shares[1]) + shares[2]
    assert np.array_equal(method.aggregate(payloads, n).numpy(), expected.astype(np.float32))


def test_both_ways_take_two_bytes_for_each_number():
    method = HalfPrecision()
    payload = Worker(method, rank=0, n_workers=2, seed=0).compress(
        0, torch.ones(1009), step=0, scalar=SCALAR
    )
    assert method.uplink_bytes(payload) == 2018
    assert method.reply_bytes([payload] * 2, 1009) == 2018
