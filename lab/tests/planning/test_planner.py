import pytest

import matrix
from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion_lab.planning.gradient_all_reduce import BASELINES
from distlion_lab.planning.line import model_line
from distlion_lab.planning.machine import CPU
from distlion_lab.planning.planner import compare_methods, find_rate, speed_up
from distlion_lab.planning.scenario import Scenario

LION_CUB = Scenario(
    n_params=350_000_000,
    nodes=8,
    link=model_line(1e9, latency_s=1e-4, message_s=1e-5),
    compute_s=0.5,
)
"""A language model of 350 M parameters on eight hosts with a GPU each, joined by Ethernet."""


def test_all_rules_patterns_and_baselines_are_compared():
    forecasts = compare_methods(LION_CUB)
    pairs = [
        (rule, pattern)
        for rule in matrix.LISTED.values()
        for pattern in matrix.PATTERNS.values()
        if matrix.carries(pattern, rule)
    ]
    assert len(forecasts.ranked) == 2 * len(pairs) + len(BASELINES)


def test_forecasts_come_fastest_first():
    seconds = [forecast.step_s for forecast in compare_methods(LION_CUB).ranked]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("factor", [5, 2, 1.05])
def test_speed_up_over_full_precision_ends_at_the_rate_found(factor):
    """The regime of Lion Cub (arXiv:2411.16462): 5x on slow links, less on faster ones."""
    rate = find_rate(LION_CUB, factor)
    assert speed_up(LION_CUB.with_rate(rate)) >= factor
    assert speed_up(LION_CUB.with_rate(1.01 * rate)) < factor


def test_five_times_needs_a_slow_link_and_a_twentieth_more_does_not():
    rates = [find_rate(LION_CUB, factor) for factor in (5, 2, 1.05)]
    assert rates == sorted(rates)
    # 350 M fp32 gradients take 20 s at 1 Gbit/s, far beyond 0.5 s of compute, and at 100 Gbit/s
    # less than backward hides.
    assert 1e9 < rates[0] < 1e10 < rates[1] < 1e11


def test_speed_up_tends_to_the_ratio_of_bits_on_the_slowest_links():
    # 64 bits of fp32 all-reduce to 2 of majority vote, each times (N - 1) / N.
    assert speed_up(LION_CUB.with_rate(1e5)) == pytest.approx(32, rel=0.01)
    assert find_rate(LION_CUB, 33) is None


def test_factor_must_be_above_zero():
    with pytest.raises(InvalidArgumentError, match="factor"):
        find_rate(LION_CUB, 0)


def test_price_is_of_workers_and_traffic():
    scenario = Scenario(
        n_params=1 << 20,
        nodes=2,
        link=LinkModel(0, 1e9),
        compute_s=3.6,
        machine=CPU,
        price_per_gpu_hour=1.0,
        price_per_gb=1000.0,
    )
    best = compare_methods(scenario).best_vote
    assert best.cost_per_1000_steps == pytest.approx(
        1000 * (2 * best.step_s / 3600 + 1000 * best.total_sent_bytes / 1e9)
    )
