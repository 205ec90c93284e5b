"""Ballots of any content: nothing is taken that should not be, and nothing is raised."""

from __future__ import annotations

import random
from typing import Any

import pytest

import ballots
from distlion_flower import Ballot, Refusal

N_BALLOTS, ROUNDS = 10_000, 20


def make_anything(rng: random.Random) -> Ballot:
    values: list[Any] = [None, True, 0, 1, -1, 2**63, 1.0, "stochastic", b"", b"\0" * 192, [], {}]
    return Ballot(*(rng.choice(values) for _ in range(6)))


@pytest.mark.parametrize("rule", ["stochastic", "residual"])
def test_ten_thousand_fuzzed_ballots_change_nothing(rule: str) -> None:
    rng = random.Random(1)
    server, quiet = (ballots.make_server(rule=rule, min_replies=2) for _ in range(2))
    n_refused = 0
    for _ in range(ROUNDS):
        nodes = list(range(4))
        call = server.begin(nodes)
        quiet.begin(nodes)
        good = {node: ballots.make_ballot(server, call, node) for node in nodes}
        for _ in range(N_BALLOTS // ROUNDS):
            node: Any = rng.choice([*nodes, 77, "0", None, 2**65])
            own = good.get(node, good[0])
            make = rng.choice([make_anything, ballots.damage, ballots.damage, ballots.lie])
            ballot = make(rng) if make is make_anything else make(own, rng)
            assert server.take(node, ballot) is not None
            n_refused += 1
        for each, own in good.items():
            assert server.take(each, own) is None
            assert quiet.take(each, own) is None
        assert server.finish().taken == quiet.finish().taken == tuple(nodes)
        ballots.assert_equal(server, ballots.to_numpy(quiet.params))
    assert n_refused == N_BALLOTS == sum(server.refused.values())
    assert server.refused[Refusal.SCALE] > 200
