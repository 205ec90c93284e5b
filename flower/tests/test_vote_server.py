"""The server of clients' votes: bitwise what a numpy oracle computes, whatever arrives."""

from __future__ import annotations

import dataclasses
import logging
import random
from typing import Any

import pytest
import torch

import ballots
from client_oracle import ClientOracle, Sent
from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from distlion_flower import Ballot, Refusal, ServerSettings, VoteServer
from distlion_flower.count import MOST_VOTES, weigh

RULES = ["stochastic", "majority", "residual"]


def make_oracle(server: VoteServer) -> ClientOracle:
    settings = server.settings
    assert isinstance(settings.lr, float)
    return ClientOracle(
        ballots.to_numpy(server.params),
        settings.rule,
        settings.lr,
        settings.momentum,
        settings.spread,
        settings.weights,
        settings.max_weight,
        settings.min_replies,
        settings.seed,
    )


@pytest.mark.parametrize("weights", ["examples", "equal"])
@pytest.mark.parametrize("rule", RULES)
def test_rounds_with_lost_late_doubled_and_damaged_ballots_equal_the_oracle(
    rule: str, weights: str
) -> None:
    server = ballots.make_server(
        rule=rule, weights=weights, lr=0.3, momentum=0.9, min_replies=3, max_weight=2.5, seed=5
    )
    oracle, rng = make_oracle(server), random.Random(0)
    late: list[tuple[int, Ballot]] = []
    happened: dict[str, int] = dict.fromkeys(["lost", "late", "doubled", "damaged", "void"], 0)
    residuals: dict[int, list[torch.Tensor]] = {}
    for _ in range(40):
        asked = rng.sample(range(12), 6)
        call = server.begin(asked)
        assert list(call.reach) == oracle.reach
        arriving, sent = [(node, ballot, "late") for node, ballot in late], []
        late = []
        for node in asked:
            shapes = [server.places.shapes[n] for n in server.places.bucket.members]
            kept = residuals.setdefault(node, [torch.zeros(shape) for shape in shapes])
            n_examples = rng.choice([1, 20, 30, 1000])
            ballot = ballots.make_ballot(server, call, node, n_examples=n_examples, residuals=kept)
            fate = rng.choice(["fine", "fine", "lost", "late", "doubled", "damaged"])
            if fate == "late":
                late.append((node, ballot))
            elif fate == "damaged":
                arriving.append((node, ballots.damage(ballot, rng), fate))
            elif fate in ("fine", "doubled"):
                arriving += [(node, ballot, "fine")] + [(node, ballot, fate)] * (fate == "doubled")
                sent.append(ballots.as_sent(ballot))
            happened[fate] = happened.get(fate, 0) + 1
        rng.shuffle(arriving)
        for node, ballot, fate in arriving:
            fault = server.take(node, ballot)
            assert fault is not None or fate in ("fine", "doubled")
        outcome = server.finish()
        assert outcome.committed == oracle.count(sent)
        assert outcome.taken == tuple(sorted(each.node for each in sent))
        happened["void"] += not outcome.committed
        ballots.assert_equal(server, oracle.params)
    assert min(happened.values()) > 0


def test_order_of_arrival_does_not_matter() -> None:
    for rule in RULES:
        servers = [ballots.make_server(rule=rule) for _ in range(2)]
        for order in (slice(None), slice(None, None, -1)), (slice(None, None, -1), slice(None)):
            for server, way in zip(servers, order, strict=True):
                call = server.begin(range(5))
                for node in list(range(5))[way]:
                    server.take(node, ballots.make_ballot(server, call, node))
                server.finish()
        ballots.assert_equal(servers[0], ballots.to_numpy(servers[1].params))


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        (Refusal.ROUND, {"round": 1}),
        (Refusal.ROUND, {"round": 0.0}),
        (Refusal.RULE, {"rule": "residual"}),
        (Refusal.EXAMPLES, {"n_examples": 0}),
        (Refusal.EXAMPLES, {"n_examples": 2.0}),
        (Refusal.EXAMPLES, {"n_examples": 1 << 53}),
        (Refusal.CHECKSUM, {"checksum": 0}),
        (Refusal.CHECKSUM, {"n_examples": 9}),
        (Refusal.DTYPE, {"payload": bytearray(128)}),
        (Refusal.LENGTH, {"payload": b""}),
        (Refusal.NODE, {"node": 2}),
    ],
)
def test_what_is_wrong_is_named(fault: Refusal, change: dict[str, Any]) -> None:
    server = ballots.make_server()
    call = server.begin([1, 2])
    ballot = ballots.make_ballot(server, call, 1)
    assert server.take(1, dataclasses.replace(ballot, **change)) is fault
    assert server.take(1, ballot) is None
    outcome = server.finish()
    assert outcome.refused == {fault: 1} == dict(server.refused)
    assert (outcome.taken, outcome.lost) == ((1,), 1)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 1001.0])
def test_a_scale_that_is_not_to_be_believed_is_refused(scale: float) -> None:
    server = ballots.make_server(max_scale=1000.0)
    ballot = ballots.make_ballot(server, server.begin([1]), 1)
    tail = torch.tensor([scale]).numpy().tobytes()
    payload = ballot.payload[:-64] + tail + ballot.payload[-60:]
    assert server.take(1, ballots.resign(ballot, payload=payload)) is Refusal.SCALE


def test_only_asked_nodes_vote_once_and_in_time() -> None:
    server = ballots.make_server()
    call = server.begin([1])
    ballot = ballots.make_ballot(server, call, 1)
    assert server.take(2, ballots.make_ballot(server, call, 2)) is Refusal.NODE
    assert server.take("1", ballot) is Refusal.NODE
    assert server.take(True, ballot) is Refusal.NODE
    assert server.take(1, ballot) is None
    assert server.take(1, ballot) is Refusal.SECOND
    server.finish()
    assert server.take(1, ballot) is Refusal.ROUND
    server.begin([1])
    assert server.take(1, ballot) is Refusal.ROUND


def test_a_client_that_failed_is_counted_and_may_send_again() -> None:
    server = ballots.make_server()
    call = server.begin([1])
    assert server.take(1, Refusal.ERROR) is Refusal.ERROR
    assert server.take(1, ballots.make_ballot(server, call, 1)) is None
    assert server.finish().refused == {Refusal.ERROR: 1}


def test_a_void_round_changes_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    server = ballots.make_server(min_replies=2)
    call = server.begin([1, 2])
    for node in (1, 2):
        server.take(node, ballots.make_ballot(server, call, node))
    server.finish()
    before, state = ballots.to_numpy(server.params), server.state_dict()
    call = server.begin([1, 2, 3])
    server.take(1, ballots.make_ballot(server, call, 1))
    server.take(2, Refusal.ERROR)
    with caplog.at_level(logging.WARNING, logger="distlion"):
        outcome = server.finish()
    assert not outcome.committed
    assert "round 1 is void: of 3 clients asked, 1 voted, 1 sent nothing" in caplog.text
    assert "1 not taken (the client failed)" in caplog.text
    ballots.assert_equal(server, before)
    after = server.state_dict()
    assert after["reach"] == state["reach"]
    assert all(torch.equal(after["momentum"][name], x) for name, x in state["momentum"].items())
    assert after["round"] == state["round"] + 1


def say_scales(ballot: Ballot, scale: float) -> Ballot:
    """Let a ballot say one scale for all of its four parameters."""
    tail = torch.full((4,), scale).numpy().tobytes().ljust(64, b"\0")
    return ballots.resign(ballot, payload=ballot.payload[:-64] + tail)


def read_largest_scale(ballot: Ballot) -> float:
    return float(torch.frombuffer(bytearray(ballot.payload[-64:]), dtype=torch.float32).max())


@pytest.mark.parametrize("scale", [0.0, 900.0])
def test_a_client_counts_for_b_whatever_scale_it_sends(scale: float) -> None:
    server = ballots.make_server(momentum=0.0, lr=1.0, spread=3.0)
    for number in range(3):
        call, honest = server.begin(range(5)), 0.0
        before = ballots.to_numpy(server.params)
        for node in range(5):
            ballot = ballots.make_ballot(server, call, node)
            if node > 2:
                ballot = say_scales(ballot, scale)
            else:
                honest = max(honest, read_largest_scale(ballot))
            assert server.take(node, ballot) is None
        server.finish()
        after = ballots.to_numpy(server.params)
        most = max(call.reach, default=3.0 * honest)
        # Of float32: the parameters are of the order of 1.
        assert max(abs(after[name] - before[name]).max() for name in after) <= most + 1e-6
        assert max(server.state_dict()["reach"]) <= 3.0 * honest, number


def test_a_residual_client_counts_for_a_bounded_scale() -> None:
    server = ballots.make_server(rule="residual", momentum=0.0, lr=1.0, max_weight=4.0)
    before = ballots.to_numpy(server.params)
    call = server.begin(range(3))
    sent = [ballots.make_ballot(server, call, node) for node in range(3)]
    sent[2] = say_scales(sent[2], 900.0)
    for node, ballot in enumerate(sent):
        assert server.take(node, ballot) is None
    server.finish()
    after = ballots.to_numpy(server.params)
    honest = max(map(read_largest_scale, sent[:2]))
    moved = max(abs(after[name] - before[name]).max() for name in after)
    assert honest < moved <= (4 + 2) * honest / 3 + 1e-6


def test_weights_are_capped_and_their_sum_is_exact_in_float32() -> None:
    assert weigh([10, 30, 1000], max_weight=10) == [10, 30, 300]
    assert weigh([1, 1], max_weight=1.5) == [1, 1]
    assert weigh([2**52, 3, 3], max_weight=10**6) == [3 * 10**6, 3, 3]
    huge = weigh([2**52] * 1000 + [1], max_weight=1.0)
    assert min(huge) == 1
    assert sum(huge) <= MOST_VOTES


def test_rate_may_depend_on_the_round() -> None:
    server = ballots.make_server(lr=lambda number: 0.5 - 0.5 * number)
    moved = []
    for _ in range(2):
        before = ballots.to_numpy(server.params)
        server.take(1, ballots.make_ballot(server, server.begin([1]), 1))
        server.finish()
        after = ballots.to_numpy(server.params)
        moved.append(any((before[name] != after[name]).any() for name in before))
    assert moved == [True, False]
    with pytest.raises(InvalidArgumentError, match=r"lr=-0\.5 in round 2: expected a number of 0"):
        server.begin([1])


def test_a_server_goes_on_from_its_state() -> None:
    straight = ballots.make_server(rule="stochastic")
    resumed = straight
    for number in range(4):
        if number == 2:
            resumed = VoteServer(straight.params, straight.settings)
            resumed.load_state_dict(straight.state_dict())
        for server in {id(each): each for each in (straight, resumed)}.values():
            call = server.begin(range(3))
            for node in range(3):
                server.take(node, ballots.make_ballot(server, call, node))
            server.finish()
    assert resumed is not straight
    ballots.assert_equal(resumed, ballots.to_numpy(straight.params))


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    server, other = ballots.make_server(), VoteServer({"weight": torch.ones(3)}, ServerSettings())
    for state in (other.state_dict(), {}, {**server.state_dict(), "reach": [1.0]}):
        with pytest.raises(CheckpointError, match="the state of the server"):
            server.load_state_dict(state)
    assert server.next_round == 0


def test_rounds_follow_each_other() -> None:
    server = ballots.make_server()
    with pytest.raises(InvalidArgumentError, match="without a round"):
        server.finish()
    server.begin([1])
    with pytest.raises(InvalidArgumentError, match="round 0 is in progress"):
        server.begin([1])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rule": "mean"}, InvalidArgumentError),
        ({"weights": "all"}, InvalidArgumentError),
        ({"lr": 0.0}, InvalidArgumentError),
        ({"lr": "fast"}, UnsupportedTypeError),
        ({"momentum": 1.0}, InvalidArgumentError),
        ({"spread": 0.0}, InvalidArgumentError),
        ({"max_weight": 0.5}, InvalidArgumentError),
        ({"max_scale": 0.0}, InvalidArgumentError),
        ({"max_scale": 3e38}, InvalidArgumentError),
        ({"min_replies": 0}, InvalidArgumentError),
        ({"min_replies": 2.0}, UnsupportedTypeError),
        ({"seed": None}, UnsupportedTypeError),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ServerSettings(**settings)


def test_what_cannot_be_voted_on_is_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"count is torch\.int64"):
        VoteServer({"count": torch.zeros(3, dtype=torch.int64)}, ServerSettings())
    with pytest.raises(InvalidArgumentError, match="no elements"):
        VoteServer({"empty": torch.zeros(0)}, ServerSettings())
    norm = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    del norm["1.num_batches_tracked"]
    with pytest.raises(InvalidArgumentError, match=r"1\.running_mean is a running statistic"):
        VoteServer(norm, ServerSettings())


def test_half_precision_is_rounded_once() -> None:
    params = {"w": torch.linspace(-3, 3, 101).half()}
    server = VoteServer(params, ServerSettings(momentum=0.0, lr=0.7))
    oracle = make_oracle(server)
    oracle.params = {"w": params["w"].float().numpy()}
    call = server.begin([0, 1])
    sent: list[Sent] = []
    for node in (0, 1):
        ballot = ballots.make_ballot(server, call, node)
        sent.append(ballots.as_sent(ballot))
        server.take(node, ballot)
    server.finish()
    oracle.buffers = {"w": torch.zeros(101).numpy()}
    oracle.count(sent)
    assert torch.equal(server.params["w"], torch.from_numpy(oracle.params["w"]).half())


def test_memory_order_of_a_parameter_does_not_matter() -> None:
    values = torch.randn(3, 4, 5, 6)
    settings = ServerSettings(momentum=0.5)
    servers = [
        VoteServer({"w": each}, settings)
        for each in (values, values.to(memory_format=torch.channels_last))
    ]
    for number in range(2):
        call = servers[0].begin([0])
        servers[1].begin([0])
        ballot = ballots.make_ballot(servers[0], call, 0)
        for server in servers:
            assert server.take(0, ballot) is None, number
            server.finish()
    assert torch.equal(servers[0].params["w"], servers[1].params["w"])
