"""Arrays that some clients do not train: they move by the majority's word, and say so."""

from __future__ import annotations

import logging

import pytest
import torch

import ballots
from client_oracle import read_payload
from distlion_flower import ServerSettings, VoteServer

N_ROUNDS = 4


def play(server: VoteServer, trained: list[int], *, size: float = 0.01) -> None:
    """Do a round of five clients: all train "body", and those of ``trained`` "head" too."""
    call = server.begin(range(5))
    for node in range(5):
        head = torch.full((100,), size if node in trained else 0.0)
        kept = [torch.zeros(70), torch.zeros(100)] if call.rule == "residual" else []
        ballot = ballots.cast(server, call, node, [torch.full((70,), 0.01), head], residuals=kept)
        assert server.take(node, ballot) is None
    assert server.finish().committed


def make_server(rule: str) -> VoteServer:
    params = {"body": torch.ones(70), "head": torch.ones(100)}
    return VoteServer(params, ServerSettings(rule=rule, momentum=0.0))


@pytest.mark.parametrize("rule", ["stochastic", "majority", "residual"])
def test_an_array_that_most_clients_do_not_train_stays_and_is_named_once(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(rule)
    with caplog.at_level(logging.WARNING, logger="distlion"):
        for _ in range(N_ROUNDS):
            play(server, [1, 4])
    assert torch.equal(server.params["head"], torch.ones(100))
    assert not torch.equal(server.params["body"], torch.ones(70))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "did not train head, so it does not move" in caplog.text


@pytest.mark.parametrize("rule", ["stochastic", "majority", "residual"])
def test_an_array_that_most_clients_train_moves_at_once_or_a_round_later(rule: str) -> None:
    server = make_server(rule)
    play(server, [1, 4])
    for _ in range(2):  # of "stochastic" the first one sets the reach
        play(server, [0, 1, 4])
    assert not torch.equal(server.params["head"], torch.ones(100))


@pytest.mark.parametrize("rule", ["stochastic", "majority", "residual"])
def test_one_client_cannot_move_an_array_that_nobody_else_trains(rule: str) -> None:
    server = make_server(rule)
    for _ in range(N_ROUNDS):
        play(server, [2], size=900.0)
    assert torch.equal(server.params["head"], torch.ones(100))


def test_arrays_that_nobody_trains_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    server = make_server("stochastic")
    play(server, [])
    assert torch.equal(server.params["head"], torch.ones(100))
    assert not caplog.records


def test_an_untrained_array_of_a_client_gets_votes_of_both_signs() -> None:
    server = make_server("stochastic")
    play(server, [0, 1, 2, 3, 4])
    call = server.begin([3])
    ballot = ballots.cast(server, call, 3, [torch.ones(70), torch.zeros(100)])
    (_, head), _ = read_payload(ballot.payload, [70, 100])
    # Of 100 fair coins within 5 standard deviations, which are 5 each.
    assert 25 < (head > 0).sum() < 75
