"""The plan, the counter, and a closed form written here from the layout: equal, to the byte."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import distlion
import matrix
from cluster import run_workers
from tiers import in_tiers

pytestmark = pytest.mark.distributed

WORLD_SIZES = [1, 2, 3, 4, 5]
SIZES = (1, 63, 64, 65, 1000, 5003)
STEPS = 2
AUTO_RULES = ("majority", "average", "full")

Report = dict[str, Any]


def rules_of(world_size: int) -> list[str]:
    """Some rules at three workers, and at two those whose bits lie between those of others."""
    if world_size == 3:
        return list(dict.fromkeys([*matrix.first_of_each_class(), *AUTO_RULES]))
    if world_size != 2:
        return list(matrix.LISTED)
    return [name for name in matrix.NAMES if "linf" not in name]  # a norm costs no bit


def runs_of(world_size: int) -> list[tuple[str, str]]:
    """Every rule under every pattern that carries its votes."""
    return [
        (rule, name)
        for rule in rules_of(world_size)
        for name, pattern in matrix.PATTERNS.items()
        if matrix.carries(pattern, matrix.RULES[rule])
    ]


EACH_RUN = [(n, p, r) for n in WORLD_SIZES for r, p in runs_of(n)]


def padded(n: int, unit: int) -> int:
    return math.ceil(n / unit) * unit


def bucket_bytes(
    rule: str, pattern: str, world_size: int, sizes: tuple[int, ...], rank: int = 1
) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives for one bucket in one step."""
    elements = sum(padded(n, 64) for n in sizes)
    shard = padded(math.ceil(elements / world_size), 512)
    frame = 64 + padded(math.ceil(len(sizes) / 8), 64)
    up, down = matrix.RULES[rule].vote_planes, matrix.RULES[rule].reply_planes(world_size)
    counts = padded(2 * len(sizes), 64) if rule == "average" else 0
    # One or two numbers for each parameter, with what is voted on each shard.
    scales = padded(4 * up * len(sizes), 64) if rule.startswith("feedback") else 0
    peers, whole = world_size - 1, shard * world_size
    vote_chunk = frame + up * shard // 8 + scales
    reply_chunk = frame + counts + down * shard // 8
    whole_vote = frame + up * whole // 8 + scales * world_size
    whole_reply = frame + counts + down * whole // 8
    if pattern == "recursive-doubling":
        return doubling_bytes(up, whole, whole_reply, len(sizes), world_size, rank)
    return {
        "all-reduce": (peers * (vote_chunk + reply_chunk),) * 2,
        "all-gather": (peers * whole_vote,) * 2,
        "parameter-server": (peers * whole_reply, peers * whole_vote)
        if rank == 0
        else (whole_vote, whole_reply),
    }[pattern]


def doubling_bytes(
    up: int, elements: int, whole_reply: int, n_params: int, world_size: int, rank: int
) -> tuple[int, int]:
    """Return what a rank sends and receives: every rank's rounds, played."""

    def chunk(votes: int) -> int:
        counts = padded(2 * n_params, 64) if votes > 1 else 0
        bits = math.ceil(math.log2(votes * (2**up - 1) + 1))
        return 64 + padded(math.ceil(n_params / 8), 64) + counts + 64 * votes + bits * elements // 8

    power = 1 << (world_size.bit_length() - 1)
    helped = range(world_size - power)  # each gets the vote of a rank beyond the power of two
    known = [1 + (other in helped) for other in range(power)]
    sent, received = [0] * world_size, [0] * world_size
    for other in helped:
        sent[other + power] += chunk(1)
        received[other] += chunk(1)
        sent[other] += whole_reply
        received[other + power] += whole_reply
    bit = 1
    while bit < power:
        for other in range(power):
            sent[other] += chunk(known[other])
            received[other] += chunk(known[other ^ bit])
        known = [known[other] + known[other ^ bit] for other in range(power)]
        bit *= 2
    return sent[rank], received[rank]


def make_params(sizes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(n)) for n in sizes]


def run_steps(optimizer: distlion.DistributedLion, rank: int, steps: int) -> Report:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for index, p in enumerate(params):
            # Presence must not change a byte: one rank leaves out one parameter at one step.
            p.grad = None if (rank, step, index) == (0, 1, 2) else torch.full_like(p, rank + 0.5)
        optimizer.step()
    plan, traffic = optimizer.plan, optimizer.traffic
    return {
        "plan": (plan.sent_bytes, plan.received_bytes, plan.messages),
        "last": (traffic.last_sent_bytes, traffic.last_received_bytes, traffic.last_messages),
        "total": (traffic.sent_bytes, traffic.received_bytes, traffic.messages),
        "steps": traffic.steps,
        "bits_per_parameter": traffic.bits_per_parameter,
        "check": traffic.check_sent_bytes,
    }


def run_all(rank: int, world_size: int) -> dict[tuple[str, str], Report]:
    reports = {}
    for rule, pattern in runs_of(world_size) + [(rule, "auto") for rule in AUTO_RULES]:
        exchange = matrix.PATTERNS.get(pattern, pattern)
        optimizer = distlion.DistributedLion(
            make_params(SIZES), aggregation=matrix.RULES[rule], exchange=exchange
        )
        reports[rule, pattern] = run_steps(optimizer, rank, STEPS)
    return reports


@functools.cache
def reports_of(world_size: int) -> list[dict[tuple[str, str], Report]]:
    return run_workers(run_all, world_size, timeout_s=120)


each_run = pytest.mark.parametrize(
    ("world_size", "pattern", "rule"), in_tiers(EACH_RUN, lambda run: run[0] == 3)
)
each_world_size = pytest.mark.parametrize("world_size", in_tiers(WORLD_SIZES, lambda n: n == 3))


@each_run
def test_plan_equals_the_counter_of_every_step(world_size: int, pattern: str, rule: str) -> None:
    for reports in reports_of(world_size):
        report = reports[rule, pattern]
        assert report["last"] == report["plan"]
        assert report["total"] == tuple(STEPS * each for each in report["plan"])
        assert report["steps"] == STEPS


@each_run
def test_counter_equals_the_closed_form(world_size: int, pattern: str, rule: str) -> None:
    for rank, reports in enumerate(reports_of(world_size)):
        sent, received, _ = reports[rule, pattern]["last"]
        assert (sent, received) == bucket_bytes(rule, pattern, world_size, SIZES, rank)


@each_run
def test_bits_per_parameter_are_the_bits_sent_in_a_step(
    world_size: int, pattern: str, rule: str
) -> None:
    for reports in reports_of(world_size):
        report = reports[rule, pattern]
        assert report["bits_per_parameter"] == 8 * report["last"][0] / sum(SIZES)


@pytest.mark.parametrize("rule", AUTO_RULES)
@each_world_size
def test_auto_is_one_of_the_patterns(world_size: int, rule: str) -> None:
    for rank, reports in enumerate(reports_of(world_size)):
        assert reports[rule, "auto"]["last"] == reports[rule, "auto"]["plan"]
        candidates = {
            bucket_bytes(rule, pattern, world_size, SIZES, rank)[0]
            for of, pattern in runs_of(world_size)
            if of == rule
        }
        assert reports[rule, "auto"]["last"][0] in candidates


@each_world_size
def test_digests_of_replicas_are_counted_apart(world_size: int) -> None:
    for reports in reports_of(world_size):
        assert (reports["majority", "all-reduce"]["check"] > 0) == (world_size > 1)


def run_big(rank: int, world_size: int) -> float:
    optimizer = distlion.DistributedLion(make_params((1 << 20,)), exchange=distlion.AllReduce())
    return float(run_steps(optimizer, rank, 1)["bits_per_parameter"])


@pytest.mark.parametrize("world_size", in_tiers([2, 4], lambda n: n == 4))
def test_majority_vote_costs_two_bits_times_n_minus_one_over_n(world_size: int) -> None:
    """The count of Lion Cub (arXiv:2411.16462) for a 1-bit all-reduce, within 1 % for frames."""
    for bits in run_workers(run_big, world_size):
        assert bits == pytest.approx(2 * (world_size - 1) / world_size, rel=0.01)


def run_groups(rank: int, world_size: int) -> Report:
    groups = [
        {"params": make_params((100, 700)), "aggregation": distlion.MajorityVote()},
        {"params": make_params((65,)), "aggregation": distlion.Average()},
        {"params": make_params((3, 4, 5)), "aggregation": distlion.QuantizedVote(bits=4)},
    ]
    return run_steps(distlion.DistributedLion(groups, exchange=distlion.AllReduce()), rank, 2)


def test_each_rule_has_a_bucket_of_its_own() -> None:
    expected = (
        bucket_bytes("majority", "all-reduce", 3, (100, 700))[0]
        + bucket_bytes("average", "all-reduce", 3, (65,))[0]
        + bucket_bytes("quantized-4", "all-reduce", 3, (3, 4, 5))[0]
    )
    for report in run_workers(run_groups, 3):
        assert report["plan"] == report["last"]
        assert report["last"][0] == expected


def run_many_buckets(rank: int, world_size: int) -> Report:
    optimizer = distlion.DistributedLion(
        make_params((1024,) * 5), exchange=distlion.AllReduce(), bucket_elements=1024
    )
    return run_steps(optimizer, rank, 2)


def test_each_bucket_has_frames_of_its_own() -> None:
    for report in run_workers(run_many_buckets, 2):
        assert report["plan"] == report["last"]
        assert report["last"][0] == 5 * bucket_bytes("majority", "all-reduce", 2, (1024,))[0]
