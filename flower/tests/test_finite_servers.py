"""A server stays finite: it does not begin otherwise, nor move there, nor load such a state."""

from __future__ import annotations

import logging

import pytest
import torch

import ballots
from distlion.errors import CheckpointError, NonFiniteError
from distlion_flower import ServerSettings, VoteServer


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_refused_at_the_start(value: float) -> None:
    params = ballots.make_params()
    params["bias"][2] = value
    with pytest.raises(NonFiniteError, match="bias is not finite before the first round"):
        VoteServer(params, ServerSettings())


@pytest.mark.parametrize("rule", ["stochastic", "majority", "residual"])
def test_a_round_that_would_leave_the_range_of_a_dtype_is_void(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The first parameter could move; the second one is at the end of float16.
    params = {"calm": torch.ones(70).half(), "edge": torch.full((70,), -65504.0).half()}
    server = VoteServer(params, ServerSettings(rule=rule, momentum=0.5, lr=1e4, max_scale=1e3))
    deltas = [torch.full((70,), 1e-3), torch.full((70,), 100.0)]
    for number in range(2):
        call = server.begin([1])
        kept = [torch.zeros(70), torch.zeros(70)] if rule == "residual" else []
        ballot = ballots.cast(server, call, 1, deltas, residuals=kept)
        assert server.take(1, ballot) is None
        with caplog.at_level(logging.WARNING, logger="distlion"):
            outcome = server.finish()
        assert not outcome.committed
        assert (outcome.taken, outcome.votes) == ((1,), ())
        assert f"round {number} is void: edge would not be finite in torch.float16" in caplog.text
    state = server.state_dict()
    assert state["reach"] == []
    assert not any(each.any() for each in state["momentum"].values())
    assert all(torch.equal(server.params[name], x) for name, x in params.items())


@pytest.mark.parametrize("kind", ["momentum", "reach", "negative", "more"])
def test_a_state_with_numbers_of_no_server_is_refused_and_changes_nothing(kind: str) -> None:
    server = ballots.make_server()
    server.take(1, ballots.make_ballot(server, server.begin([1]), 1))
    server.finish()
    state, before = server.state_dict(), server.state_dict()
    if kind == "momentum":
        state["momentum"]["long"][3] = float("nan")
    elif kind == "more":
        state["momentum"]["head"] = torch.zeros(3)
    else:
        state["reach"][0] = -1.0 if kind == "negative" else float("inf")
    with pytest.raises(CheckpointError, match="head" if kind == "more" else "not finite"):
        server.load_state_dict({**state, "round": 9})
    assert server.next_round == 1
    assert server.state_dict()["reach"] == before["reach"]
    assert torch.equal(server.state_dict()["momentum"]["long"], before["momentum"]["long"])
