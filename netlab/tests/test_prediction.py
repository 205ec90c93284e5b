from dataclasses import replace

import pytest

import matrix
from distlion.wire import LinkModel
from distlion_lab.planning.machine import CPU
from distlion_netlab.prediction import Surroundings, predict_step
from distlion_netlab.traffic import Traffic

SURROUNDINGS = Surroundings(
    n_parameters=8_000_000,
    hosts=4,
    cores=4,
    link=LinkModel(latency_s=1e-3, rate_bit_per_s=1e8),
    machine=CPU,
    votes=Traffic(rate_bit_per_s=1e8, core_s_per_byte=0.0),
    gradients=Traffic(rate_bit_per_s=1e8, core_s_per_byte=0.0),
    server=Traffic(rate_bit_per_s=1e8, core_s_per_byte=0.0),
    floor_s=0.2,
)


def at_rate(rate_bit_per_s):
    traffic = Traffic(rate_bit_per_s, 0.0)
    return replace(SURROUNDINGS, votes=traffic, gradients=traffic, server=traffic)


def test_the_floor_is_what_was_measured():
    assert predict_step("none", SURROUNDINGS) == 0.2


def test_a_vote_takes_the_floor_and_its_bytes_at_least():
    # 1 bit up and 1 bit down for three quarters of the parameters.
    transfer_s = 2 * 0.75 * 8_000_000 / 1e8
    predicted = predict_step("majority-all-reduce", SURROUNDINGS)
    assert 0.2 + transfer_s < predicted < 0.2 + 1.2 * transfer_s


@pytest.mark.parametrize(
    "name", ["ddp-fp32", "ddp-fp16", "majority-all-gather", "average-parameter-server"]
)
def test_a_faster_link_makes_a_faster_step(name):
    assert predict_step(name, at_rate(1e9)) < predict_step(name, at_rate(1e8))


def test_half_the_bits_of_an_all_reduce_take_about_half_the_time_on_a_slow_link():
    whole, half = (predict_step(name, at_rate(1e6)) for name in ("ddp-fp32", "ddp-fp16"))
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_auto_is_the_best_of_the_patterns():
    names = [f"majority-{pattern}" for pattern in matrix.PATTERNS]
    best = min(predict_step(name, SURROUNDINGS) for name in names)
    assert predict_step("majority-auto", SURROUNDINGS) == best


def test_overlap_hides_communication():
    overlapped = predict_step("majority-all-reduce-overlap", SURROUNDINGS)
    assert overlapped < predict_step("majority-all-reduce", SURROUNDINGS)


def test_hosts_that_share_cores_compute_more_slowly():
    crowded = predict_step("quantized-8-all-reduce", replace(SURROUNDINGS, cores=1))
    assert crowded > predict_step("quantized-8-all-reduce", SURROUNDINGS)


@pytest.mark.parametrize("name", ["ddp-powersgd", "all-reduce-fp32"])
def test_what_has_no_closed_form_is_not_predicted(name):
    assert predict_step(name, SURROUNDINGS) is None


@pytest.mark.parametrize(
    ("name", "further_s"),
    [
        # 3 quarters of 8 million votes of a bit, there and back, and of as many numbers of 4 bytes.
        ("majority-all-reduce", 1e-7 * 2 * 0.75 * 1e6),
        ("ddp-fp32", 1e-9 * 2 * 0.75 * 32e6),
    ],
)
@pytest.mark.parametrize("cores", [4, 2])
def test_a_fast_link_is_bounded_by_the_cores_that_work_on_packets(name, further_s, cores):
    fast = replace(at_rate(1e15), link=LinkModel(0.0, 1e15), cores=cores)
    costly = replace(fast, votes=Traffic(1e15, 1e-7), gradients=Traffic(1e15, 1e-9))
    # Cores that hosts share have less time for each.
    expected_s = further_s * 4 / cores
    assert predict_step(name, costly) - predict_step(name, fast) == pytest.approx(
        expected_s, rel=0.01
    )


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("all-reduce", "votes"),
        ("all-gather-gloo", "gradients"),  # a ring
        ("all-gather-tcp", "votes"),
        ("parameter-server", "server"),
    ],
)
def test_every_pattern_is_predicted_by_messages_like_its_own(pattern, kind):
    name = f"majority-{pattern}"
    for slowed in ("votes", "gradients", "server"):
        slower = replace(SURROUNDINGS, **{slowed: Traffic(1e7, 0.0)})
        differs = predict_step(name, slower) != predict_step(name, SURROUNDINGS)
        assert differs == (slowed == kind)
