import pytest

from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion_lab.planning.scenario import Scenario

GIVEN = {"n_params": 1000, "nodes": 4, "link": LinkModel(0, 1e9), "compute_s": 0.5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_params", 0),
        ("nodes", 0),
        ("nodes", 100_001),
        ("gpus_per_node", 0),
        ("compute_s", 0.0),
        ("compute_s", float("nan")),
        ("overlap_share", 1.5),
        ("backward_share", -0.1),
        ("price_per_gb", -1.0),
        ("wire", "udp"),
        ("price_per_gpu_hour", float("inf")),
    ],
)
def test_value_out_of_range_is_an_error(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        Scenario(**(GIVEN | {name: value}))


def test_workers_share_the_link_of_their_node():
    scenario = Scenario(**GIVEN, gpus_per_node=8)
    assert scenario.worker_link.rate_bit_per_s == 1e9 / 8
    assert scenario.own_params == 125


def test_a_round_over_own_sockets_takes_one_way():
    given = GIVEN | {"link": LinkModel(0.1, 1e9)}
    assert Scenario(**given).worker_link.latency_s == 0.1
    assert Scenario(**given, wire="tcp").worker_link.latency_s == 0.05
    assert Scenario(**given, wire="tcp").link.latency_s == 0.1  # of all-reduce
