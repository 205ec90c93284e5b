"""A worker that dies, freezes or sends damaged bytes in a vote on deltas: the others stop whole.

At every point of a vote each other worker raises a typed error, with the bits of the oracle before
that vote, or after it.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest

import distlion
from accident import assert_died
from cluster import run_workers
from distlion import errors, faults
from local_accidents import (
    AT_VOTE,
    COMMITTED,
    N_WORKERS,
    Ending,
    VoteAccident,
    check_place,
    meet,
    stage_all,
)
from local_runs import EVERY
from tiers import in_tiers

pytestmark = pytest.mark.distributed

SCALED = distlion.ScaledVote()
TIMEOUT_S = 2.0
# Votes and replies are framed one after the other; checkpoints are saved between steps.
MOMENTS = {point: (point, 1) for point in faults.POINTS if point != "checkpoint"}
MOMENTS["framed again"] = ("framed", 2)

KILLED = {name: VoteAccident(*moment) for name, moment in MOMENTS.items()}
KILLED |= {f"scaled, {name}": VoteAccident(*each, rule=SCALED) for name, each in MOMENTS.items()}
STOPPED = {
    name: VoteAccident(*moment, kind="stop", timeout_s=TIMEOUT_S)
    for name, moment in MOMENTS.items()
}
TABLES = (KILLED, STOPPED)
QUICK = (
    {"framed again", "scaled, counted"},
    {"before_commit"},
)


def each_of(table: dict[str, VoteAccident]) -> pytest.MarkDecorator:
    quick = QUICK[TABLES.index(table)]
    return pytest.mark.parametrize("name", in_tiers(table, lambda name: name in quick))


@functools.cache
def endings_of(number: int, quick: bool) -> dict[str, list[Any]]:
    """Stage all accidents of a table that are in one tier."""
    table, names = TABLES[number], QUICK[number]
    return stage_all({name: each for name, each in table.items() if (name in names) == quick})


def check_others(table: dict[str, VoteAccident], name: str, kind: type[Exception]) -> Any:
    """Check all workers but the victim; return what became of it."""
    number, accident = TABLES.index(table), table[name]
    endings = endings_of(number, name in QUICK[number])[name]
    # Where the victim had sent all that it had to send, the others complete the vote.
    n_votes = AT_VOTE + (accident.point in COMMITTED)
    for rank, ending in enumerate(endings):
        if rank == accident.victim:
            continue
        assert isinstance(ending, Ending), ending
        assert ending.kind == kind.__name__, ending.text
        assert ending.culprits == (accident.victim,), ending.text
        assert ending.n_steps == EVERY * (n_votes + 1)
        assert ending.n_votes == n_votes
        check_place(accident.rule, rank, ending)
        assert (ending.afterwards, ending.is_whole) == ("ProcessGroupError", True)
    return endings[accident.victim]


@each_of(KILLED)
def test_a_worker_that_dies_leaves_the_others_whole(name: str) -> None:
    assert_died(check_others(KILLED, name, errors.PeerLostError))


@each_of(STOPPED)
def test_a_worker_that_freezes_is_named_at_the_timeout(name: str) -> None:
    victim = check_others(STOPPED, name, errors.StepTimeoutError)
    assert isinstance(victim, Ending), victim
    assert victim.kind in ("StepTimeoutError", "PeerLostError"), victim.text
    assert victim.n_votes <= AT_VOTE + (STOPPED[name].point in COMMITTED)
    check_place(STOPPED[name].rule, STOPPED[name].victim, victim)
    assert victim.is_whole


# The scales are the last 64 bytes of a chunk, and bits come after the header and the presence.
PLACES = {"magic": 0, "step": 8, "length": 32, "checksum": 60, "presence": 64, "bits": 128}
PLACES |= {"scales": -64, "padding": -1}
FRAMES = {"votes": 1, "replies": 2}
SERVER = distlion.ParameterServer()
DAMAGED = {
    f"{place} of {frame}": VoteAccident("framed", firing, kind="damage", at_byte=at_byte)
    for frame, firing in FRAMES.items()
    for place, at_byte in PLACES.items()
}
for _place in ("step", "bits", "scales"):
    _damage: dict[str, Any] = {"kind": "damage", "at_byte": PLACES[_place], "rule": SCALED}
    DAMAGED |= {
        f"gathered {_place}": VoteAccident("framed", exchange=distlion.AllGather(), **_damage),
        f"{_place} to the server": VoteAccident("framed", exchange=SERVER, **_damage),
    }
FROM_SERVER = VoteAccident(
    "framed", 2, kind="damage", at_byte=-64, victim=0, exchange=SERVER, timeout_s=TIMEOUT_S
)


def meet_all(rank: int, world_size: int) -> list[Ending]:
    """Meet one accident after the other, each in a process group of its own."""
    with tempfile.TemporaryDirectory() as folder:
        accidents = [*DAMAGED.values(), FROM_SERVER]
        return [meet(rank, world_size, accident, folder) for accident in accidents]


@functools.cache
def endings_of_damage() -> list[list[Ending]]:
    return run_workers(meet_all, N_WORKERS)


@pytest.mark.slow
def test_damaged_bytes_stop_all_with_nothing_taken() -> None:
    ended = endings_of_damage()
    for number, (name, accident) in enumerate(DAMAGED.items()):
        for rank, endings in enumerate(ended):
            ending = endings[number]
            assert ending.kind == errors.CorruptFrameError.__name__, (name, ending.text)
            assert (ending.n_steps, ending.n_votes) == (2 * EVERY, AT_VOTE), name
            assert (ending.fired >= accident.firing) == (rank == accident.victim), name
            check_place(accident.rule, rank, ending)
            assert (ending.afterwards, ending.is_whole) == ("ProcessGroupError", True), name


@pytest.mark.slow
def test_a_damaged_reply_of_the_server_is_taken_by_none_but_the_server() -> None:
    """The server has counted the vote itself, and misses the others in the next one."""
    server, *others = (endings[-1] for endings in endings_of_damage())
    assert server.kind in ("StepTimeoutError", "PeerLostError"), server.text
    assert (server.n_votes, server.fired) == (AT_VOTE + 1, 2)
    for rank, ending in enumerate([server, *others]):
        check_place(FROM_SERVER.rule, rank, ending)
        assert (ending.afterwards, ending.is_whole) == ("ProcessGroupError", True)
    for ending in others:
        assert (ending.kind, ending.n_votes) == ("CorruptFrameError", AT_VOTE), ending.text
