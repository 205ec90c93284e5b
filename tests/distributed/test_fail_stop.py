"""A rank that dies or freezes at any fault point stops all others; they name it, change nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import distlion
import matrix
from accident import (
    ACCIDENT_STEP,
    Accident,
    Report,
    assert_died,
    assert_one_step_apart,
    assert_stopped,
    assert_survivors_stopped,
    stage_all,
)
from distlion import errors, faults
from tiers import in_tiers

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
ALL_REDUCE = {"exchange": distlion.AllReduce()}
ALL_GATHER = {"exchange": distlion.AllGather()}
PARAMETER_SERVER = {"exchange": distlion.ParameterServer()}
DOUBLING = {"exchange": distlion.RecursiveDoubling()}
OVERLAP = {"exchange": distlion.AllReduce(), "overlap": True, "bucket_elements": 1024}
NODES = {"exchange": distlion.AllReduce(), "nodes": distlion.Nodes(ranks_per_node=2)}
REPLIES_ARE_IN = ("before_commit", "after_commit")


def killed(point: str, firing: int = 1, **rest: Any) -> Accident:
    return Accident(point, firing, **({"options": ALL_REDUCE} | rest))


def stopped(point: str, firing: int = 1, **rest: Any) -> Accident:
    return killed(point, firing, **({"kind": "stop", "timeout_s": TIMEOUT_S} | rest))


def late(**rest: Any) -> Accident:
    return killed("before_step", **({"kind": "late", "timeout_s": TIMEOUT_S} | rest))


# Votes and replies are framed one after the other; checkpoints are saved between steps.
MOMENTS = {point: (point, 1) for point in faults.POINTS if point != "checkpoint"}
MOMENTS["framed again"] = ("framed", 2)

KILLED = {name: killed(*moment) for name, moment in MOMENTS.items()}
STOPPED = {name: stopped(*moment) for name, moment in MOMENTS.items()}
KILLED_ELSEWHERE = {
    "rank 0, before its votes": killed("framed", victim=0),
    "rank 0, before its reply": killed("framed", 2, victim=0),
    "all-gather, before its votes": killed("framed", options=ALL_GATHER),
    "all-gather, counted": killed("counted", options=ALL_GATHER),
    "server's worker": killed("framed", options=PARAMETER_SERVER),
    "the server, counted": killed("counted", victim=0, options=PARAMETER_SERVER),
    "the server, before the reply": killed("framed", 2, victim=0, options=PARAMETER_SERVER),
    "doubling, before its votes": killed("framed", victim=0, options=DOUBLING),
    "doubling, in a later round": killed("framed", 2, victim=0, options=DOUBLING),
    "doubling, counted": killed("counted", options=DOUBLING),
    "overlap, first bucket": killed("framed", options=OVERLAP),
    "overlap, a later bucket": killed("counted", 2, options=OVERLAP),
    "nodes, before its votes": killed("framed", world_size=4, options=NODES),
    "nodes, first of a node": killed("counted", victim=2, world_size=4, options=NODES),
}
STOPPED_ELSEWHERE = {
    "all-gather": stopped("framed", options=ALL_GATHER),
    "server's worker": stopped("framed", options=PARAMETER_SERVER),
    "overlap": stopped("framed", 2, options=OVERLAP),
    "nodes": stopped("framed", world_size=4, options=NODES),
}
LATE = {name: late(options={"exchange": pattern}) for name, pattern in matrix.PATTERNS.items()}
OVER_GLOO = {
    f"{kind} {where}": stage(point, firing, wire="gloo", **rest)
    for kind, stage in (("killed", killed), ("stopped", stopped))
    for where, point, firing, rest in (
        *((moment, *MOMENTS[moment], {}) for moment in MOMENTS),
        ("in doubling", "counted", 1, {"options": DOUBLING}),
        ("as the server", "framed", 2, {"victim": 0, "options": PARAMETER_SERVER}),
        ("in overlap", "counted", 2, {"options": OVERLAP}),
        ("in a node", "framed", 1, {"world_size": 4, "options": NODES}),
    )
    if not (kind == "stopped" and where == "as the server")
}
LATE_OVER_GLOO = {"late": late(options=ALL_REDUCE, wire="gloo")}
BUSY = {"kill": killed("framed", busy=2), "stop": stopped("framed", busy=2)}
ALL = (
    KILLED,
    STOPPED,
    KILLED_ELSEWHERE,
    STOPPED_ELSEWHERE,
    LATE,
    BUSY,
    OVER_GLOO,
    LATE_OVER_GLOO,
)
# Four moments of a kill and three patterns; what repeats them elsewhere is slow.
QUICK = (
    {"after_encode", "framed again", "before_commit", "after_commit"},
    {"framed again"},
    {
        "all-gather, counted",
        "doubling, in a later round",
        "the server, before the reply",
    },
    {"nodes"},
    {"all-reduce"},
    {"kill"},
    {"stopped framed"},
    {"late"},
)


def each_of(argument: str, table: dict[str, Accident]) -> pytest.MarkDecorator:
    quick = QUICK[ALL.index(table)]
    return pytest.mark.parametrize(argument, in_tiers(table, lambda name: name in quick))


@functools.cache
def reports_of(table: int, quick: bool) -> dict[str, list[Any]]:
    """Stage all accidents of a table that are in one tier."""
    chosen = {name: each for name, each in ALL[table].items() if (name in QUICK[table]) == quick}
    return stage_all(chosen)


def survivors_of(table: dict[str, Accident], name: str) -> tuple[list[Report], Any]:
    """Check the survivors; return their reports, and what became of the victim."""
    number = ALL.index(table)
    accident, reports = table[name], reports_of(number, name in QUICK[number])[name]
    kind = errors.PeerLostError if accident.kind == "kill" else errors.StepTimeoutError
    survivors = assert_survivors_stopped(accident, reports, kind)
    return survivors, reports[accident.victim]


@each_of("moment", KILLED)
def test_killed_rank_is_named_by_all_before_any_timeout(moment: str) -> None:
    survivors, victim = survivors_of(KILLED, moment)
    assert_died(victim)
    # Where the victim had sent all that it had to send, the others completed the step.
    expected = ACCIDENT_STEP + (moment in REPLIES_ARE_IN)
    assert [report.counter for report in survivors] == [expected, expected]


@each_of("moment", STOPPED)
def test_frozen_rank_is_named_by_all_at_the_timeout_and_fails_when_it_wakes(moment: str) -> None:
    assert_wakes_to_an_error(*survivors_of(STOPPED, moment))


def assert_wakes_to_an_error(survivors: list[Report], victim: Any) -> None:
    assert isinstance(victim, Report), victim
    assert victim.kind in ("StepTimeoutError", "PeerLostError"), victim.text
    assert victim.culprits == (1,), victim.text
    assert "this one" in victim.text
    assert_stopped(victim)
    assert_one_step_apart([*survivors, victim])
    assert victim.counter <= max(report.counter for report in survivors), "it went on alone"


@each_of("where", KILLED_ELSEWHERE)
def test_killed_rank_is_named_in_every_pattern(where: str) -> None:
    _, victim = survivors_of(KILLED_ELSEWHERE, where)
    assert_died(victim)


@each_of("where", STOPPED_ELSEWHERE)
def test_frozen_rank_is_named_in_every_pattern(where: str) -> None:
    assert_wakes_to_an_error(*survivors_of(STOPPED_ELSEWHERE, where))


@each_of("pattern", LATE)
def test_rank_that_comes_too_late_commits_nothing(pattern: str) -> None:
    """What the others have sent waits for it: it must not take that for a vote."""
    survivors, victim = survivors_of(LATE, pattern)
    for report in survivors:
        assert "did not come" in report.text
    assert victim.counter == ACCIDENT_STEP
    assert_wakes_to_an_error(survivors, victim)


@each_of("accident", OVER_GLOO)
def test_over_gloo_a_rank_that_dies_or_freezes_is_named(accident: str) -> None:
    survivors, victim = survivors_of(OVER_GLOO, accident)
    if OVER_GLOO[accident].kind == "kill":
        assert_died(victim)
    else:
        assert_wakes_to_an_error(survivors, victim)


@pytest.mark.slow
@each_of("accident", LATE_OVER_GLOO)
def test_over_gloo_a_rank_that_comes_too_late_commits_nothing(accident: str) -> None:
    survivors, victim = survivors_of(LATE_OVER_GLOO, accident)
    assert victim.counter == ACCIDENT_STEP
    assert_wakes_to_an_error(survivors, victim)


@each_of("kind", BUSY)
def test_rank_that_still_computes_is_not_blamed(kind: str) -> None:
    survivors_of(BUSY, kind)
