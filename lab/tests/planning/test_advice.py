import json
from dataclasses import replace

import pytest

from distlion.errors import InvalidArgumentError
from distlion.votes import MajorityVote
from distlion.wire import LinkModel
from distlion_lab.planning.advice import DO_NOT_COMPRESS, Regime, advise, build_record, find_regimes
from distlion_lab.planning.gradient_all_reduce import GradientAllReduce, forecast_all_reduce
from distlion_lab.planning.line import model_line
from distlion_lab.planning.machine import CPU, GPU
from distlion_lab.planning.planner import compare_methods, fastest_vote
from distlion_lab.planning.scenario import Scenario

SLOW = Scenario(
    n_params=350_000_000,
    nodes=8,
    link=model_line(1e9, latency_s=1e-4, message_s=1e-5),
    compute_s=0.5,
)


def test_slow_link_is_worth_compressing():
    advice = advise(compare_methods(SLOW))
    assert advice.compress
    assert advice.text.startswith("Compress: MajorityVote() by AllReduce()")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"link": LinkModel(1e-5, 4e11)}, "arithmetic"),
        ({"compute_s": 500.0}, "hides"),
        ({"compute_s": 30.0, "overlap_share": 0.0, "link": LinkModel(0, 1e11)}, "small part"),
        ({"nodes": 1}, "single node"),
        ({"nodes": 100_000, "link": LinkModel(1e-5, 1e11, message_s=1e-5)}, "arithmetic"),
    ],
    ids=["fast link", "much compute", "no overlap", "single node", "too many nodes"],
)
def test_advice_flips_and_says_why(changes, reason):
    given = {
        "n_params": SLOW.n_params,
        "nodes": SLOW.nodes,
        "link": SLOW.link,
        "compute_s": SLOW.compute_s,
    }
    advice = advise(compare_methods(Scenario(**(given | changes))))
    assert not advice.compress
    assert advice.text.startswith(DO_NOT_COMPRESS)
    assert reason in advice.text


HIDES_LITTLE = Scenario(
    n_params=10**9, nodes=4, link=model_line(125e9, latency_s=1e-4, message_s=1e-5), compute_s=0.1
)
"""Votes gain too little here, and an all-reduce takes longer than computing."""


def test_communication_is_called_small_only_where_it_is():
    forecasts = compare_methods(HIDES_LITTLE)
    best, baseline = forecasts.best_vote, forecasts.best_baseline
    assert baseline.exposed_s > HIDES_LITTLE.compute_s
    assert best.step_s < baseline.step_s
    advice = advise(forecasts, threshold=10.0)
    assert not advice.compress
    assert "small part" not in advice.text
    costs = (best.arithmetic_s, best.exposed_s, baseline.arithmetic_s, baseline.exposed_s)
    for seconds in costs:
        assert f"{seconds:.3g} s" in advice.text


@pytest.mark.parametrize(("share", "small"), [(0.09, True), (0.11, False)])
def test_a_tenth_of_computing_is_no_small_part(share, small):
    scenario = replace(SLOW, compute_s=1.0, overlap_share=0.0)
    baseline_s = compare_methods(scenario).best_baseline.exposed_s
    forecasts = compare_methods(replace(scenario, compute_s=baseline_s / share))
    assert forecasts.best_baseline.exposed_s == pytest.approx(baseline_s)
    assert ("small part" in advise(forecasts, threshold=10.0).text) == small


MANY_NODES = replace(SLOW, nodes=1000, link=LinkModel(latency_s=1e-4, rate_bit_per_s=1e10))
"""A ring takes 1,998 rounds of 0.1 ms here, a tree 20."""


def fastest_all_reduce_s(scenario):
    """Return the seconds of a step by the fastest of all uncompressed all-reduces."""
    return min(
        forecast_all_reduce(scenario, GradientAllReduce(bits, algorithm)).step_s
        for bits in (16, 32)
        for algorithm in ("ring", "tree")
    )


@pytest.mark.parametrize("scenario", [SLOW, MANY_NODES])
def test_votes_are_compared_with_the_fastest_all_reduce(scenario):
    forecasts = compare_methods(scenario)
    fastest_s = fastest_all_reduce_s(scenario)
    assert forecasts.gain == fastest_s / forecasts.best_vote.step_s - 1
    assert f"{fastest_s:.3g} s" in advise(forecasts).text


def test_a_tree_is_named_where_a_ring_is_slow():
    assert "(tree)" in advise(compare_methods(MANY_NODES)).text


@pytest.mark.parametrize("scenario", [SLOW, MANY_NODES])
def test_last_regime_ends_where_the_fastest_all_reduce_is_as_fast(scenario):
    regime = find_regimes(scenario)[-1]
    assert regime.against == "the best all-reduce"

    def gain(rate):
        at_rate = scenario.with_rate(rate)
        return fastest_all_reduce_s(at_rate) / fastest_vote(at_rate, MajorityVote()).step_s

    assert gain(regime.rate_bit_per_s) >= regime.factor > gain(1.01 * regime.rate_bit_per_s)


def test_threshold_decides():
    forecasts = compare_methods(SLOW)
    assert advise(forecasts, threshold=forecasts.gain).compress
    assert not advise(forecasts, threshold=1.01 * forecasts.gain).compress
    with pytest.raises(InvalidArgumentError, match="threshold"):
        advise(forecasts, threshold=-0.1)


def test_record_survives_json():
    forecasts = compare_methods(SLOW)
    record = build_record(forecasts, advise(forecasts))
    assert json.loads(json.dumps(record, allow_nan=False))["gain"] == forecasts.gain


@pytest.mark.parametrize(
    ("rate", "words"),
    [(None, "at no rate"), (1e13, "at any rate"), (2.5e9, "up to 2.5gbit/s")],
)
def test_regime_says_where_a_speed_up_ends(rate, words):
    assert Regime(5.0, "something", rate).describe() == f"5x against something: {words}"


@pytest.mark.parametrize(("gbit", "limits"), [(1, False), (100, True)])
def test_a_host_that_takes_longer_than_the_link_is_named(gbit, limits):
    forecasts = compare_methods(replace(SLOW, link=model_line(gbit * 1e9, latency_s=1e-4)))
    best = forecasts.best_vote
    assert (best.host_s > best.communication_s) == limits
    text = advise(forecasts).text
    assert ("The host frames, checks and counts" in text) == limits
    if limits:
        assert f"{best.host_s:.3g} s" in text


def test_without_a_host_beside_it_nothing_is_named():
    baseline = forecast_all_reduce(SLOW, GradientAllReduce(32, "ring"))
    assert baseline.host_s == 0


def test_cores_that_work_on_packets_are_named_where_they_limit():
    machine = replace(CPU, vote_wire_s_per_byte=1e-6)
    fast = replace(SLOW, machine=machine, link=LinkModel(0.0, 1e12))
    text = advise(compare_methods(fast)).text
    assert "The cores that compute also work on packets for" in text
    assert "a faster link would gain little" in text
    beside_gpu = replace(fast, machine=GPU)
    assert "packets" not in advise(compare_methods(beside_gpu)).text
