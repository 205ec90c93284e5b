import math
from dataclasses import replace

import pytest

import matrix
from distlion.errors import InvalidArgumentError
from distlion.layout import BucketShape
from distlion.votes import MajorityVote, QuantizedVote
from distlion.votes.full_precision import FullPrecision
from distlion.wire import (
    MOST_BYTES_AT_ONCE,
    PATTERNS,
    AllGather,
    AllReduce,
    Exchange,
    LinkModel,
    ParameterServer,
)
from distlion.wire.cost import MOST_OVERLAP_BUCKETS, exchange_seconds
from distlion.wire.recursive_doubling import RecursiveDoubling
from distlion_lab.planning.line import model_line
from distlion_lab.planning.machine import GPU
from distlion_lab.planning.scenario import Scenario
from distlion_lab.planning.votes import (
    BUCKET_ELEMENTS,
    forecast_votes,
    list_able,
    name_rule,
    stream_seconds,
)

N_ELEMENTS = 1 << 21
FRAMES_AND_PADDING = 0.01
"""A chunk of this size has 128 bytes of frame, and up to 511 elements of padding a shard."""

PAIRS = {
    f"{name}, {pattern_name}": (rule, pattern)
    for name, rule in matrix.LISTED.items()
    for pattern_name, pattern in matrix.PATTERNS.items()
    if matrix.carries(pattern, rule)
}
each_pair = pytest.mark.parametrize(("rule", "pattern"), PAIRS.values(), ids=PAIRS)
each_pattern_of_floats = pytest.mark.parametrize(
    "pattern", matrix.PATTERNS_OF_ALL_RULES.values(), ids=matrix.PATTERNS_OF_ALL_RULES
)
each_pattern = pytest.mark.parametrize("pattern", matrix.PATTERNS.values(), ids=matrix.PATTERNS)


def make_scenario(**changes):
    given = {
        "n_params": 10_000_000,
        "nodes": 4,
        "link": LinkModel(1e-4, 1e9),
        "compute_s": 0.5,
    }
    return Scenario(**(given | changes))


def bits_of_doubling(up, down, n):
    """Add up what the first rank sends: its sums, and the reply where there is a rank to help."""
    power = 2 ** math.floor(math.log2(n))
    bits = sum(
        math.ceil(math.log2((size + min(size, n - power)) * (2**up - 1) + 1))
        for size in (2**bit for bit in range(round(math.log2(power))))
    )
    return bits + down * (n > power)


# Bits an element that the busiest of n ranks sends, of u bits of a vote and d bits of a reply.
BITS = {
    AllReduce: lambda u, d, n: (n - 1) / n * (u + d),
    AllGather: lambda u, d, n: (n - 1) * u,
    ParameterServer: lambda u, d, n: max(u, (n - 1) * d) if n > 1 else 0,
    RecursiveDoubling: bits_of_doubling,
}


@each_pair
@pytest.mark.parametrize("n", range(1, 9))
def test_closed_form_agrees_with_the_exact_plan(rule, pattern, n):
    shape = rule.shape_of(N_ELEMENTS, n)
    sent_bytes = max(pattern.plan(shape, rank).sent_bytes for rank in range(n))
    expected = BITS[type(pattern)](rule.vote_planes, rule.reply_planes(n), n)
    assert 8 * sent_bytes / N_ELEMENTS == pytest.approx(expected, rel=FRAMES_AND_PADDING)


@each_pattern
@pytest.mark.parametrize("n", range(2, 9))
def test_no_rank_is_busier_than_the_first_and_the_last(pattern, n):
    shape = MajorityVote(tie="zero").shape_of(N_ELEMENTS, n)
    plans = [pattern.plan(shape, rank) for rank in range(n)]
    assert max(plan.sent_bytes for plan in plans) == max(plans[0].sent_bytes, plans[-1].sent_bytes)


def test_majority_vote_by_all_reduce_sends_two_bits_less_the_own_shard():
    sent_bytes = AllReduce().plan(MajorityVote().shape_of(N_ELEMENTS, 4), 0).sent_bytes
    assert 8 * sent_bytes / N_ELEMENTS == pytest.approx(1.5, rel=FRAMES_AND_PADDING)


@each_pair
def test_forecast_adds_up(rule, pattern):
    scenario = make_scenario()
    forecast = forecast_votes(scenario, rule, pattern, overlap=False)
    shape = rule.shape_of(scenario.n_params, scenario.nodes)
    assert forecast.communication_s == exchange_seconds(pattern, shape, scenario.worker_link)
    assert forecast.exposed_s == forecast.communication_s
    parts_s = scenario.compute_s + forecast.arithmetic_s + forecast.exposed_s
    assert forecast.step_s == pytest.approx(parts_s)
    assert forecast.efficiency == scenario.compute_s / forecast.step_s
    assert forecast.sent_bytes == max(pattern.plan(shape, r).sent_bytes for r in range(4))
    assert forecast.total_sent_bytes == sum(pattern.plan(shape, r).sent_bytes for r in range(4))


def test_single_node_sends_nothing():
    forecast = forecast_votes(make_scenario(nodes=1), MajorityVote(), AllReduce(), overlap=False)
    assert (forecast.sent_bytes, forecast.communication_s) == (0, 0.0)


def test_workers_of_a_node_send_together_what_a_flat_exchange_sends():
    flat = forecast_votes(make_scenario(), MajorityVote(), AllReduce(), overlap=False)
    nodes = forecast_votes(
        make_scenario(gpus_per_node=8), MajorityVote(), AllReduce(), overlap=False
    )
    assert nodes.sent_bytes == pytest.approx(flat.sent_bytes, rel=FRAMES_AND_PADDING)


def test_gradients_inside_a_node_take_the_time_of_the_node_link():
    free = LinkModel(0.0, 1e30)
    scenario = make_scenario(
        gpus_per_node=2, link=free, node_link=LinkModel(0.0, 8.0), n_params=1 << 20
    )
    forecast = forecast_votes(scenario, MajorityVote(), AllReduce(), overlap=False)
    # Half of the float32 gradients and half of the one-bit replies, at a byte a second.
    assert forecast.communication_s == pytest.approx((1 << 19) * (4 + 1 / 8))


def test_overlap_leaves_what_backward_cannot_hide():
    scenario = make_scenario(compute_s=1e-6)
    forecast = forecast_votes(scenario, FullPrecision(), AllReduce(), overlap=True)
    hidden_s = forecast.communication_s - forecast.exposed_s
    assert hidden_s == pytest.approx(scenario.hideable_s, rel=1e-3)


def test_overlap_leaves_the_last_bucket_at_least():
    forecast = forecast_votes(make_scenario(), MajorityVote(), AllReduce(), overlap=True)
    # sqrt(T / L) is 3.0 here.
    assert forecast.exposed_s == pytest.approx(forecast.communication_s / 3)


class TestCoresThatWorkOnPackets:
    """What they spend there no backward hides, however fast the link."""

    BUSY = replace(GPU, vote_wire_s_per_byte=1e-6, bucket_s=0.01)

    def test_without_overlap_the_longer_of_link_and_processor_counts(self):
        slow, fast = LinkModel(1e-4, 1e6), LinkModel(1e-4, 1e11)
        for link, bound_by_cores in ((slow, False), (fast, True)):
            scenario = make_scenario(machine=self.BUSY, link=link)
            forecast = forecast_votes(scenario, MajorityVote(), AllReduce(), overlap=False)
            processor_s = 1e-6 * forecast.sent_bytes
            expected_s = processor_s if bound_by_cores else forecast.communication_s
            assert forecast.exposed_s == pytest.approx(expected_s)

    def test_with_overlap_every_further_bucket_costs_its_share(self):
        scenario = make_scenario(machine=self.BUSY, compute_s=60.0)
        forecast = forecast_votes(scenario, MajorityVote(), AllReduce(), overlap=True)
        # Three buckets, as above: two more than without.
        assert forecast.exposed_s == pytest.approx(1e-6 * forecast.sent_bytes + 2 * 0.01)

    def test_a_single_node_spends_nothing_on_packets(self):
        scenario = make_scenario(machine=self.BUSY, nodes=1, n_params=3 * BUCKET_ELEMENTS)
        for overlap in (False, True):
            forecast = forecast_votes(scenario, MajorityVote(), AllReduce(), overlap=overlap)
            assert (forecast.processor_s, forecast.exposed_s) == (0.0, 0.0)

    def test_momenta_come_after_the_votes(self):
        every, never = (
            forecast_votes(
                make_scenario(
                    machine=self.BUSY,
                    link=LinkModel(0.0, 1e12),
                    momentum_sync_every=momentum_sync_every,
                ),
                MajorityVote(),
                AllReduce(),
                overlap=False,
            )
            for momentum_sync_every in (100, None)
        )
        further_bytes = every.sent_bytes - never.sent_bytes
        assert further_bytes > 0
        assert every.exposed_s - never.exposed_s == pytest.approx(1e-6 * further_bytes)

    def test_a_node_of_several_workers_shares_the_bytes(self):
        forecast = forecast_votes(
            make_scenario(machine=self.BUSY, link=LinkModel(0.0, 1e12), gpus_per_node=4),
            MajorityVote(),
            AllReduce(),
            overlap=False,
        )
        assert forecast.exposed_s == pytest.approx(1e-6 * forecast.sent_bytes / 4, rel=1e-6)


def test_the_last_bucket_of_a_server_goes_up_and_comes_down():
    link = LinkModel(0.0, 1e8)
    scenario = make_scenario(compute_s=60.0, link=link)
    forecast = forecast_votes(scenario, MajorityVote(), ParameterServer(), overlap=True)
    bucket = MajorityVote().shape_of(-(-scenario.n_params // MOST_OVERLAP_BUCKETS), 4)
    assert forecast.exposed_s == exchange_seconds(ParameterServer(), bucket, link)
    # It is more than its share: the earlier ones send while they receive.
    assert forecast.exposed_s > 1.5 * forecast.communication_s / MOST_OVERLAP_BUCKETS


def test_large_model_has_buckets_of_bounded_size():
    one = forecast_votes(
        make_scenario(n_params=BUCKET_ELEMENTS), MajorityVote(), AllReduce(), overlap=False
    )
    two = forecast_votes(
        make_scenario(n_params=2 * BUCKET_ELEMENTS), MajorityVote(), AllReduce(), overlap=False
    )
    assert two.communication_s == pytest.approx(2 * one.communication_s)


@each_pair
def test_step_takes_longer_with_more_parameters_and_on_slower_links(rule, pattern):
    scenario = make_scenario()
    step_s = forecast_votes(scenario, rule, pattern, overlap=True).step_s
    for slower in (
        make_scenario(n_params=20_000_000),
        make_scenario(link=LinkModel(1e-4, 1e8)),
        make_scenario(link=LinkModel(1e-1, 1e9)),
    ):
        assert forecast_votes(slower, rule, pattern, overlap=True).step_s > step_s


@each_pair
def test_a_hundred_thousand_nodes_are_forecast(rule, pattern):
    forecast = forecast_votes(make_scenario(nodes=100_000), rule, pattern, overlap=False)
    assert 0 < forecast.step_s < math.inf


def test_rule_is_named_without_its_defaults():
    names = [name_rule(rule) for rule in (MajorityVote(), MajorityVote(tie="zero"))]
    assert names == ["MajorityVote()", "MajorityVote(tie='zero')"]
    assert name_rule(QuantizedVote()) == "QuantizedVote(bits=4)"


@each_pattern_of_floats
@pytest.mark.parametrize(("bits", "sent_bits"), [(32, 64), (16, 48)])
def test_averaging_momenta_adds_its_bits_and_hides_behind_nothing(
    pattern: Exchange, bits: int, sent_bits: float
) -> None:
    without = Scenario(
        n_params=1 << 24,
        nodes=4,
        link=model_line(1e9, latency_s=1e-4, message_s=1e-5),
        compute_s=1.0,
    )
    every = 64
    averaging = replace(without, momentum_sync_every=every, momentum_sync_bits=bits)

    for overlap in (False, True):
        plain, synced = (
            forecast_votes(scenario, MajorityVote(), pattern, overlap=overlap)
            for scenario in (without, averaging)
        )
        more = synced.bits_per_parameter - plain.bits_per_parameter
        if pattern == AllReduce():
            # All but its own quarter, up and down; frames are 128 bytes of 32 KiB and more.
            assert more == pytest.approx(0.75 * sent_bits / every, rel=0.01)
        extra_s = synced.exposed_s - plain.exposed_s
        assert extra_s == pytest.approx(synced.communication_s - plain.communication_s)
        assert extra_s > 8 * 0.75 * (1 << 24) / every / 1e9


def test_a_pattern_that_counts_in_parts_carries_no_floats():
    scenario, doubling = make_scenario(), RecursiveDoubling()
    assert doubling in list_able(scenario, MajorityVote())
    assert doubling not in list_able(scenario, FullPrecision())
    assert doubling not in list_able(replace(scenario, momentum_sync_every=100), MajorityVote())
    with pytest.raises(InvalidArgumentError, match="FullPrecision"):
        forecast_votes(scenario, FullPrecision(), doubling, overlap=False)


def test_recursive_doubling_wins_with_many_workers_and_long_round_trips():
    """1,024 workers: 10 rounds of one message each, where others send 1,023 and more."""
    link = model_line(1e9, latency_s=2e-2, message_s=5e-4)
    scenario = make_scenario(n_params=1_000_000, nodes=1024, link=link)
    seconds = {
        repr(pattern): forecast_votes(scenario, MajorityVote(), pattern, overlap=False).step_s
        for pattern in matrix.PATTERNS.values()
    }
    assert min(seconds, key=seconds.__getitem__) == "RecursiveDoubling()"
    few = replace(scenario, nodes=8, n_params=100_000_000)
    seconds = {
        repr(pattern): forecast_votes(few, MajorityVote(), pattern, overlap=False).step_s
        for pattern in matrix.PATTERNS.values()
    }
    assert min(seconds, key=seconds.__getitem__) == "AllReduce()"


def test_orthogonalized_directions_cost_their_matrix_products() -> None:
    plain, wide = (make_scenario(orthogonalized_width=width) for width in (0, 512))
    forecasts = [
        forecast_votes(each, MajorityVote(), AllReduce(), overlap=False) for each in (plain, wide)
    ]
    added_s = forecasts[1].step_s - forecasts[0].step_s
    # Newton-Schulz on a layer with matrices of 512 x 1536, 512 x 512 and two of 512 x 2048.
    operations = sum(5 * (4 * 512**2 * n + 2 * 512**3) for n in (1536, 512, 2048, 2048))
    expected = operations / (12 * 512**2) * 10_000_000 / GPU.operations_per_s
    assert added_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("width", [-1, 1_000_001])
def test_width_out_of_range_is_refused(width: int) -> None:
    with pytest.raises(InvalidArgumentError, match="orthogonalized_width"):
        make_scenario(orthogonalized_width=width)


def test_a_ring_costs_rounds_over_gloo_alone():
    shape = MajorityVote().shape_of(1 << 22, 4)
    forecasts = {
        wire: forecast_votes(
            make_scenario(n_params=1 << 22, wire=wire, link=LinkModel(1.0, 1e30)),
            MajorityVote(),
            AllReduce(),
            overlap=False,
        )
        for wire in ("gloo", "tcp")
    }
    assert shape.reply_chunk.n_bytes > MOST_BYTES_AT_ONCE
    assert forecasts["gloo"].communication_s == pytest.approx(1 + 3)
    # Each round over own sockets takes half of one of Gloo's.
    assert forecasts["tcp"].communication_s == pytest.approx(2 * 0.5)


def size_bucket(n_shards, vote_bytes, reply_bytes):
    """Size a bucket of one parameter, whose votes have one bit, and so one plane."""
    return BucketShape(n_shards, 1, vote_bytes, reply_bytes, False, vote_bytes)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_one_bucket_streams_as_it_is_exchanged(pattern):
    shape, link = size_bucket(4, 1 << 20, 1 << 19), LinkModel(1e-3, 1e8)
    assert stream_seconds(pattern, shape, link, 1) == exchange_seconds(pattern, shape, link)


def test_replies_of_a_bucket_come_while_votes_of_the_next_leave():
    link = LinkModel(0.0, 8e6)  # a megabyte in a second
    shape, pattern = size_bucket(2, 1 << 20, 1 << 20), ParameterServer()
    plan = pattern.plan(shape, 1)
    one_way_s = max(plan.sent_bytes, plan.received_bytes) / 1e6
    both_ways_s = (plan.sent_bytes + plan.received_bytes) / 1e6
    seconds = stream_seconds(pattern, shape, link, 3)
    assert seconds == pytest.approx(both_ways_s + 2 * one_way_s)
    # Of a link that does one at a time nothing is gained.
    half = LinkModel(0.0, 8e6, full_duplex=False)
    assert stream_seconds(pattern, shape, half, 3) == pytest.approx(3 * both_ways_s)


def test_a_single_worker_streams_nothing():
    assert stream_seconds(AllReduce(), size_bucket(1, 64, 64), LinkModel(1.0, 1.0), 3) == 0.0
