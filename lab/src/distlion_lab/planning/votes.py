"""A step with votes: bytes and seconds of a rule under a pattern."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from distlion.layout import BucketShape, shape_momenta
from distlion.votes import Aggregation
from distlion.wire import PATTERNS, Exchange, LinkModel
from distlion.wire.cost import count_overlap_buckets, exchange_seconds
from distlion_lab.planning.forecast import Forecast, Load, make_forecast
from distlion_lab.planning.machine import COUNTED_STATE_BYTES, STATE_BYTES, Machine
from distlion_lab.planning.scenario import Scenario

BUCKET_ELEMENTS = 1 << 26
"""Elements of a bucket without overlap: more, smaller ones only cost latency."""

_GRAD_BYTES = 4
_SYNC_DTYPES = {32: torch.float32, 16: torch.bfloat16}


def forecast_votes(
    scenario: Scenario, rule: Aggregation, pattern: Exchange, *, overlap: bool
) -> Forecast:
    """Forecast a step of one rule under one pattern.

    Several workers in a node average their gradients inside it. Each then votes for its part of the
    parameters over its share of the node's link, and replies are gathered inside. Averaged momenta
    follow the votes.
    """
    n_buckets = _count_buckets(scenario, rule, overlap=overlap)
    shape = rule.shape_of(-(-scenario.own_params // n_buckets), scenario.nodes)
    pattern.check_carries(shape, rule)
    busiest = max(_sent_bytes(pattern, shape, rank) for rank in (0, scenario.nodes - 1))
    total = pattern.plan_total(shape)
    per_node = n_buckets * scenario.gpus_per_node
    momenta = _plan_momenta(scenario, pattern)
    host_s = n_buckets * _host_s(scenario.machine, rule, pattern, shape)
    inside_s = _inside_node_s(scenario, rule.reply_planes(scenario.nodes))
    link = scenario.worker_link
    load = Load(
        sent_bytes=per_node * busiest + scenario.gpus_per_node * momenta.busiest_bytes,
        total_sent_bytes=per_node * total + scenario.gpus_per_node * momenta.total_bytes,
        arithmetic_s=_arithmetic_s(scenario, rule) + host_s,
        host_s=host_s,
        communication_s=stream_seconds(pattern, shape, link, n_buckets) + inside_s,
        last_bucket_s=exchange_seconds(pattern, shape, link) + inside_s / n_buckets,
        late_s=max(momenta.seconds, momenta.busiest_bytes * scenario.machine.vote_wire_s_per_byte),
        processor_s=_processor_s(scenario, n_buckets, busiest),
    )
    return make_forecast(
        scenario, load, method=name_rule(rule), pattern=repr(pattern), votes=True, overlap=overlap
    )


def stream_seconds(pattern: Exchange, shape: BucketShape, link: LinkModel, n_buckets: int) -> float:
    """Predict the seconds of the exchanges of ``n_buckets`` equal buckets, with several under way.

    While the replies of one bucket return, the votes of the next ones are sent.

    Equation:
        T = T_1 + (n - 1) T_n
        T_1 is ``exchange_seconds``; T_n likewise, but with sending and receiving at once.
    """
    further_s = exchange_seconds(pattern, shape, link, both_ways=True)
    return exchange_seconds(pattern, shape, link) + (n_buckets - 1) * further_s


def list_able(scenario: Scenario, rule: Aggregation) -> list[Exchange]:
    """List the patterns that carry a rule's votes, and momenta where they are averaged."""
    averages = scenario.momentum_sync_every is not None
    return [
        pattern
        for pattern in PATTERNS.values()
        if pattern.carries(rule.shape_of(1, scenario.nodes))
        and not (averages and pattern.counts_in_parts)
    ]


def name_rule(rule: Aggregation) -> str:
    """Format a rule with its bits and its other arguments that differ from their defaults."""
    frozen: Any = rule  # every rule is a frozen dataclass
    arguments = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(frozen)
        if (value := getattr(rule, field.name)) != field.default or field.name == "bits"
    ]
    return f"{type(rule).__name__}({', '.join(arguments)})"


class _Momenta(NamedTuple):
    """Mean load of averaging momenta in a step, for one worker of each node."""

    busiest_bytes: float = 0.0
    total_bytes: float = 0.0
    seconds: float = 0.0


def _plan_momenta(scenario: Scenario, pattern: Exchange) -> _Momenta:
    every = scenario.momentum_sync_every
    if every is None or scenario.nodes == 1:
        return _Momenta()
    dtype = _SYNC_DTYPES[scenario.momentum_sync_bits]
    shape = shape_momenta(scenario.own_params, scenario.nodes, dtype)
    first, others = (_sent_bytes(pattern, shape, rank) for rank in (0, scenario.nodes - 1))
    return _Momenta(
        max(first, others) / every,
        (first + (scenario.nodes - 1) * others) / every,
        exchange_seconds(pattern, shape, scenario.worker_link) / every,
    )


def _count_buckets(scenario: Scenario, rule: Aggregation, *, overlap: bool) -> int:
    needed = -(-scenario.own_params // BUCKET_ELEMENTS)
    if not overlap:
        return needed
    whole = rule.shape_of(-(-scenario.own_params // needed), scenario.nodes)
    return max(needed, count_overlap_buckets([(whole, scenario.worker_link)] * needed))


def _sent_bytes(pattern: Exchange, shape: BucketShape, rank: int) -> int:
    return pattern.plan(shape, rank).sent_bytes


def _arithmetic_s(scenario: Scenario, rule: Aggregation) -> float:
    """Return the seconds of encode and commit; a single node encodes nothing."""
    machine, own = scenario.machine, scenario.own_params
    orthogonalize_s = machine.orthogonalize_s(own, scenario.orthogonalized_width)
    if scenario.nodes == 1:
        return machine.commit_s(scenario.n_params, scenario.n_params, 0) + orthogonalize_s
    planes = rule.reply_planes(scenario.nodes)
    state_s = machine.pass_s(own * STATE_BYTES) if rule.worker_state else 0.0
    return (
        machine.encode_s(own, rule.vote_planes)
        + orthogonalize_s
        + state_s
        + machine.commit_s(scenario.n_params, own, planes)
    )


def _host_s(machine: Machine, rule: Aggregation, pattern: Exchange, shape: BucketShape) -> float:
    """Return the seconds in which the busiest rank counts votes and writes and reads frames."""
    if shape.n_shards == 1:
        return 0.0
    work, plan = pattern.cost(shape), pattern.plan(shape, 0)
    counted = work.counted_bytes * 8 / rule.vote_planes if rule.worker_state else 0.0
    return (
        work.counted_bytes / machine.count_bytes_per_s
        + machine.pass_s(counted * COUNTED_STATE_BYTES)
        + (plan.sent_bytes + plan.received_bytes) / machine.frame_bytes_per_s
        + work.frames_written * machine.write_frame_s
        + work.frames_read * machine.read_frame_s
    )


def _processor_s(scenario: Scenario, n_buckets: int, sent_bytes: int) -> float:
    """Return the seconds that exchanges take from the busiest worker's compute cores."""
    if scenario.nodes == 1:
        return 0.0
    machine = scenario.machine
    return (
        n_buckets * sent_bytes * machine.vote_wire_s_per_byte + (n_buckets - 1) * machine.bucket_s
    )


def _inside_node_s(scenario: Scenario, reply_planes: int) -> float:
    """Return the seconds to reduce-scatter float32 gradients and to gather replies in a node."""
    peers, link = scenario.gpus_per_node - 1, scenario.node_link
    n_bytes = scenario.own_params * peers * (_GRAD_BYTES + reply_planes / 8)
    return 2 * peers * link.latency_s + link.transfer_s(n_bytes, n_bytes)
