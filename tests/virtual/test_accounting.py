"""What virtual workers would have sent, as papers count it: bits for each parameter."""

from __future__ import annotations

import pytest
import torch

import distlion
from distlion import MomentumSync
from distlion.errors import InvalidArgumentError
from drawn import set_grads
from virtual_steps import do_step, make_cluster


@pytest.mark.parametrize(
    ("rule", "sync", "up", "down"),
    [
        (distlion.MajorityVote(), None, 1, 1),
        (distlion.Average(), None, 1, 3),
        (distlion.QuantizedVote(bits=4), None, 4, 1),
        (distlion.MajorityVote(), MomentumSync(every=10), 1 + 3.2, 1 + 3.2),
        (distlion.MajorityVote(), MomentumSync(every=10, dtype=torch.bfloat16), 1 + 1.6, 1 + 3.2),
    ],
)
def test_bits_of_both_directions_are_the_mean_of_all_steps(
    rule: distlion.MajorityVote, sync: MomentumSync | None, up: float, down: float
) -> None:
    cluster, params = make_cluster(4, aggregation=rule, momentum_sync=sync)
    for step in range(20):
        do_step(cluster, params, step)

    assert cluster.up_bits_per_parameter == pytest.approx(up)
    assert cluster.down_bits_per_parameter == pytest.approx(down)


def test_momenta_of_a_step_that_is_skipped_are_not_sent() -> None:
    cluster, params = make_cluster(2, nonfinite="skip", momentum_sync=MomentumSync(every=1))
    do_step(cluster, params, 0)
    for worker in range(2):
        set_grads(params.values(), worker, 1)
        params["a"].grad[worker] = float("nan")
        cluster.collect(worker)
    cluster.step()

    assert cluster.committed_step == 1
    assert cluster.up_bits_per_parameter == pytest.approx((2 * 1 + 32) / 2)
    assert cluster.down_bits_per_parameter == pytest.approx((2 * 1 + 32) / 2)


def test_traffic_is_that_of_the_pattern_that_was_asked_for() -> None:
    doubling, rule = distlion.RecursiveDoubling(), distlion.MajorityVote()
    cluster, params = make_cluster(5, aggregation=rule, exchange=doubling)
    do_step(cluster, params, 0)
    (bucket,) = cluster._buckets
    plan = doubling.plan(rule.shape(bucket.layout, 5), 4)
    assert cluster.traffic.last_sent_bytes == plan.sent_bytes > 0
    assert cluster.traffic.last_messages == plan.messages == 1


def test_votes_that_the_pattern_cannot_carry_are_refused_at_construction() -> None:
    with pytest.raises(InvalidArgumentError, match=r"RecursiveDoubling\(\).*FullPrecision"):
        make_cluster(4, aggregation=distlion.FullPrecision(), exchange=distlion.RecursiveDoubling())
