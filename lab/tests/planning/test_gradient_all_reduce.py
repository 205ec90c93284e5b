from dataclasses import replace

import pytest

from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion_lab.planning.gradient_all_reduce import (
    DDP_BUCKET_BYTES,
    GradientAllReduce,
    forecast_all_reduce,
)
from distlion_lab.planning.machine import GPU
from distlion_lab.planning.scenario import Scenario


def make_scenario(**changes):
    given = {"n_params": 1_000_000, "nodes": 4, "link": LinkModel(0.0, 8.0), "compute_s": 1e-3}
    return Scenario(**(given | changes))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_all_reduce_sends_nearly_two_copies_of_the_gradients(n, bits, algorithm):
    forecast = forecast_all_reduce(make_scenario(nodes=n), GradientAllReduce(bits, algorithm))
    expected_bytes = 2 * (n - 1) / n * 1_000_000 * bits / 8
    assert forecast.sent_bytes == pytest.approx(expected_bytes)
    assert forecast.communication_s == pytest.approx(expected_bytes)  # at a byte a second


@pytest.mark.parametrize(("algorithm", "rounds"), [("ring", 14), ("tree", 6)])
def test_latency_counts_the_rounds_of_every_bucket(algorithm, rounds):
    n_params = 3 * DDP_BUCKET_BYTES // 4
    scenario = make_scenario(n_params=n_params, nodes=8, link=LinkModel(1.0, 1e30))
    forecast = forecast_all_reduce(scenario, GradientAllReduce(32, algorithm))
    assert forecast.communication_s == pytest.approx(3 * rounds)


def test_workers_of_a_node_add_the_time_inside_and_no_bytes_between():
    flat = forecast_all_reduce(make_scenario(), GradientAllReduce())
    nodes = forecast_all_reduce(
        make_scenario(gpus_per_node=2, node_link=LinkModel(0.0, 8.0)), GradientAllReduce()
    )
    assert nodes.sent_bytes == flat.sent_bytes
    # Reduce-scatter and all-gather of float32 between two: half of the bytes, twice.
    assert nodes.communication_s - flat.communication_s == pytest.approx(4_000_000)


def test_what_packets_take_of_the_cores_is_not_hidden():
    machine = replace(GPU, gradient_wire_s_per_byte=1e-8)
    scenario = make_scenario(link=LinkModel(0.0, 1e12), compute_s=60.0, machine=machine)
    forecast = forecast_all_reduce(scenario, GradientAllReduce())
    assert forecast.exposed_s == pytest.approx(1e-8 * forecast.sent_bytes)


@pytest.mark.parametrize("arguments", [{"bits": 8}, {"algorithm": "star"}])
def test_unknown_baseline_is_an_error(arguments):
    with pytest.raises(InvalidArgumentError, match="AllReduce"):
        GradientAllReduce(**arguments)
