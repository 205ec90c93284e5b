import json
import time

import pytest

from distlion.errors import InvalidArgumentError
from distlion_netlab import GptWorkload, SweepSettings, VectorWorkload, run_sweep
from distlion_netlab.sweep import summarize
from distlion_netlab.traffic import read_busy_s

TINY = GptWorkload(layers=1, width=32, heads=2, vocabulary=64, batch_size=1, context=8)
METHODS = (
    "none",
    "ddp-fp32",
    "majority-all-reduce",
    "average-all-gather",
    "quantized-2-auto-overlap",
)
VALID = {"hosts": 2, "rates": ("1gbit",), "methods": ("none",), "workload": TINY}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hosts": 1}, "hosts is 1"),
        ({"rates": ()}, "rates are"),
        ({"rates": ("fast",)}, "rate 'fast'"),
        ({"rates": ("1gbit,1gbit,1gbit",)}, "3 rates for 2 hosts"),
        ({"methods": ("none", "none")}, "each once"),
        ({"methods": ("sometimes",)}, "method 'sometimes'"),
        ({"repetitions": 1}, "repetitions is 1"),
        ({"block_s": -1.0}, "block_s is -1.0"),
    ],
)
def test_wrong_setting_is_an_error(wrong, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SweepSettings(**VALID | wrong)


def test_summary_holds_median_quartiles_and_values():
    assert summarize([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "median": 3.0,
        "q1": 2.0,
        "q3": 4.0,
        "values": [4.0, 1.0, 3.0, 2.0, 5.0],
    }


@pytest.fixture(scope="module")
def record(namespaces_work):
    settings = SweepSettings(
        hosts=2,
        rates=("1gbit", "unlimited"),
        methods=METHODS,
        workload=TINY,
        repetitions=2,
        block_s=0,
    )
    progress = []
    found = run_sweep(settings, progress.append)
    assert progress[-1].done == progress[-1].total == 2 * 2 * len(METHODS)
    return json.loads(json.dumps(found))


@pytest.mark.root
class TestARecord:
    def test_nothing_was_left_out(self, record):
        assert record["missing"] == {}
        assert list(record["results"]) == ["1gbit", "unlimited"]
        assert all(list(methods) == list(METHODS) for methods in record["results"].values())

    def test_replicas_of_ours_are_equal(self, record):
        assert record["replicas_equal"] == dict.fromkeys(METHODS[2:], True)

    def test_ratios_are_those_of_the_repetitions(self, record):
        results = record["results"]["1gbit"]
        ours, baseline = results["majority-all-reduce"], results["ddp-fp32"]
        assert ours["speed_up"]["ddp-fp32"]["values"] == [
            a / b
            for a, b in zip(baseline["seconds"]["values"], ours["seconds"]["values"], strict=True)
        ]
        assert results["none"]["speed_up"]["none"]["values"] == [1.0, 1.0]

    def test_the_floor_sends_no_more_than_barriers(self, record):
        assert max(record["results"]["1gbit"]["none"]["interface_bytes"]) < 5_000

    @pytest.mark.parametrize("name", METHODS[2:])
    def test_interfaces_count_more_than_the_optimizer_hands_over(self, record, name):
        result = record["results"]["1gbit"][name]
        for interface_bytes, sent_bytes in zip(
            result["interface_bytes"], result["sent_bytes"], strict=True
        ):
            assert interface_bytes > sent_bytes > 0

    def test_processor_time_of_workers_is_reported(self, record):
        for methods in record["results"].values():
            assert all(method["cpu_s"] > 0 for method in methods.values())

    def test_busy_cores_are_reported(self, record):
        busy_s = [
            method["busy_s"]
            for methods in record["results"].values()
            for method in methods.values()
        ]
        # A block of one step can lie between two of the kernel's ticks; all together can not.
        assert min(busy_s) >= 0 and sum(busy_s) > 0

    def test_what_sending_takes_is_measured_at_each_rate(self, record):
        assert list(record["traffic"]) == list(record["links"]) == ["1gbit", "unlimited"]
        for kinds in record["traffic"].values():
            assert list(kinds) == ["votes", "gradients", "server"]
            # A copy alone takes a nanosecond for some bytes; ten microseconds a byte is absurd.
            assert all(1e-11 < kind["core_s_per_byte"] < 1e-5 for kind in kinds.values())
        for kind in record["traffic"]["1gbit"].values():
            assert 1e7 < kind["rate_bit_per_s"] < 1.1e9

    def test_conditions_tell_machine_and_versions(self, record):
        assert {"cpu", "cores", "torch", "date", "kernel"} <= record["conditions"].keys()


def test_busy_seconds_grow_by_what_a_process_works():
    before, started = read_busy_s(), time.process_time()
    while time.process_time() < started + 0.3:
        pass
    # The kernel counts in ticks of 10 ms.
    assert read_busy_s() - before > 0.2


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_work")
def test_vector_is_exchanged_and_its_bytes_are_those_of_the_plan():
    n_elements = 1 << 20
    settings = SweepSettings(
        hosts=3,
        rates=("unlimited",),
        methods=("all-reduce-fp32", "majority-all-reduce"),
        workload=VectorWorkload(n_elements),
        repetitions=2,
        block_s=0.2,
    )
    record = run_sweep(settings, lambda progress: None)
    assert record["n_parameters"] == n_elements
    result = record["results"]["unlimited"]["majority-all-reduce"]
    assert set(result["speed_up"]) == {"all-reduce-fp32"}
    for interface_bytes, wire_bytes in zip(
        result["interface_bytes"], result["wire_bytes"], strict=True
    ):
        # Plan and headers within 3 %, and a barrier for the block.
        assert interface_bytes == pytest.approx(wire_bytes, rel=0.03, abs=2_000)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_work")
def test_method_that_cannot_run_is_left_out_and_the_others_go_on(monkeypatch):
    settings = SweepSettings(
        **VALID | {"methods": ("none", "majority-all-reduce"), "repetitions": 2}
    )
    # What workers cannot build: the parent's checks do not see it.
    object.__setattr__(settings, "methods", ("none", "majority-sometimes"))
    monkeypatch.setattr("distlion_netlab.sweep.adapts", lambda name: False)
    record = run_sweep(settings, lambda progress: None)
    assert (
        "InvalidArgumentError: method 'majority-sometimes'"
        in record["missing"]["majority-sometimes"]
    )
    assert list(record["results"]["1gbit"]) == ["none"]
