"""The strategy for Flower: bitwise a numpy oracle, whatever messages arrive."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is tested in an environment of its own")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    RecordDict,
)

import distlion_flower
from bad_post import Post, copy_reply
from client_oracle import ClientOracle
from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from distlion_flower import Refusal
from distlion_flower import bridge as flower
from in_process import InProcessGrid

SHAPES = {"weight": (70, 3), "bias": (5,), "long": (517,)}
SEED = 11


def make_arrays() -> ArrayRecord:
    generator = torch.Generator().manual_seed(0)
    arrays = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return ArrayRecord({**arrays, "batches": torch.tensor([3])})


def count_examples(node: int, number: int) -> int:
    return 1 + (node * 37 + number * 11) % 90


def train(message: Message, context: Context) -> Message:
    """Move every parameter by a chance of the node and the round, towards 0 on the whole."""
    number = message.content["config"]["server-round"]
    rng = np.random.default_rng([context.node_id, number])
    before = message.content["arrays"]
    after = {
        name: array.numpy() * np.float32(0.9) + rng.normal(0, 0.05, array.shape).astype(np.float32)
        for name, array in before.items()
        if name in SHAPES
    }
    return flower.vote(
        message,
        before,
        after,
        count_examples(context.node_id, number),
        context=context,
        metrics={"loss": float(number), "node": context.node_id},
        seed=SEED,
    )


def make_oracle(settings: Any, *, rule: str) -> ClientOracle:
    params = {name: make_arrays()[name].numpy().ravel() for name in SHAPES}
    return ClientOracle(
        params,
        rule,
        settings["lr"],
        settings["momentum"],
        settings["spread"],
        "examples",
        settings["max_weight"],
        settings["min_replies"],
    )


def assert_equal(arrays: ArrayRecord, params: dict[str, Any]) -> None:
    for name in SHAPES:
        found = arrays[name].numpy().ravel().view(np.int32)
        np.testing.assert_array_equal(found, params[name].view(np.int32))


@pytest.mark.parametrize("rule", ["stochastic", "majority", "residual"])
def test_strategy_equals_the_oracle_over_rounds_with_a_bad_post(rule: str) -> None:
    settings = {
        "lr": 0.4,
        "momentum": 0.5,
        "spread": 2.5,
        "max_weight": 3.0,
        "min_replies": 3,
    }
    oracle, post = make_oracle(settings, rule=rule), Post()
    strategy = flower.Votes(rule=rule, **settings, fraction_train=0.5, fraction_evaluate=0.0)
    arrays = make_arrays()
    random.seed(5)
    grid = InProcessGrid(train, 12, post)
    result = strategy.start(grid, arrays, num_rounds=30)
    committed = [oracle.count(sent) for sent in post.rounds]
    assert [outcome.committed for outcome in strategy.outcomes] == committed
    assert 0 < sum(committed) < 30
    assert set(post.happened) == {"fine", "lost", "late", "doubled", "damaged"}
    assert_equal(result.arrays, oracle.params)
    assert result.arrays["batches"].numpy().tolist() == [3]
    kept = [len(context.state) for context in grid.contexts.values()]
    assert any(kept) == (rule == "residual")


def test_ten_thousand_damaged_messages_are_not_taken_and_raise_nothing() -> None:
    settings = {
        "lr": 0.4,
        "momentum": 0.5,
        "spread": 2.5,
        "max_weight": 3.0,
        "min_replies": 2,
    }
    oracle, post = make_oracle(settings, rule="stochastic"), Post(n_damaged=50)
    strategy = flower.Votes(**settings, fraction_evaluate=0.0)
    random.seed(5)
    result = strategy.start(InProcessGrid(train, 10, post), make_arrays(), num_rounds=20)
    for sent in post.rounds:
        oracle.count(sent)
    assert post.happened["damaged"] >= 10_000
    n_refused = sum(sum(outcome.refused.values()) for outcome in strategy.outcomes)
    assert n_refused >= 10_000
    n_taken = sum(len(outcome.taken) for outcome in strategy.outcomes)
    assert n_taken == sum(map(len, post.rounds))
    assert_equal(result.arrays, oracle.params)


def test_strange_senders_are_refused() -> None:
    strategy = flower.Votes(fraction_evaluate=0.0)

    def deliver(replies: list[Message]) -> list[Message]:
        stranger, forger = (copy_reply(reply) for reply in replies[:2])
        stranger.metadata.__dict__["_src_node_id"] = 99
        # A ballot of one node that comes from another one, which has not voted.
        forger.metadata.__dict__["_src_node_id"] = replies[2].metadata.src_node_id
        return [stranger, forger, replies[0]]

    strategy.start(InProcessGrid(train, 3, deliver), make_arrays(), num_rounds=1)
    (outcome,) = strategy.outcomes
    assert outcome.refused == {Refusal.NODE: 1, Refusal.CHECKSUM: 1}
    assert len(outcome.taken) == 1


def test_virtual_clients_move_as_flower_does() -> None:
    arrays = make_arrays()
    params = {name: torch.nn.Parameter(torch.from_numpy(arrays[name].numpy())) for name in SHAPES}
    clients = distlion_flower.VirtualClients(
        params.items(), clients=6, seed=SEED, lr=0.4, spread=2.0
    )
    strategy = flower.Votes(lr=0.4, spread=2.0, seed=SEED, fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(train, 5), arrays, num_rounds=4)
    for number in range(1, 5):
        clients.begin(range(1, 6))
        for node in range(1, 6):
            rng = np.random.default_rng([node, number])
            for param in params.values():
                noise = rng.normal(0, 0.05, tuple(param.shape)).astype(np.float32)
                after = param.detach().numpy() * np.float32(0.9) + noise
                param.data.copy_(torch.from_numpy(after))
            clients.collect(node, count_examples(node, number))
        clients.step()
    assert_equal(result.arrays, {name: x.detach().numpy().ravel() for name, x in params.items()})


def test_a_reply_carries_about_one_bit_for_each_parameter() -> None:
    sizes: list[int] = []

    def count(replies: list[Message]) -> list[Message]:
        for reply in replies:
            content = reply.content
            chunks = [content.deflate(), *(record.deflate() for record in content.values())]
            chunks += [content["vote"]["vote"].deflate(), content["vote"]["vote"].data]
            sizes.append(sum(map(len, chunks)))
        return replies

    big = ArrayRecord({"weight": Array(np.zeros((300, 400), np.float32))})

    def train_big(message: Message, context: Context) -> Message:
        return flower.vote(message, big, {"weight": np.ones((300, 400), np.float32)}, 1)

    strategy = flower.Votes(fraction_evaluate=0.0)
    strategy.start(InProcessGrid(train_big, 2, count), big, num_rounds=1)
    assert all(120_000 <= 8 * size < 1.1 * 120_000 for size in sizes)
    (outcome,) = strategy.outcomes
    assert 8 * outcome.counted_bytes / 2 < 1.01 * 120_000


def test_votes_are_not_told_their_seed_differ() -> None:
    payloads = set()

    def keep(replies: list[Message]) -> list[Message]:
        payloads.update(reply.content["vote"]["vote"].data for reply in replies)
        return replies

    arrays = make_arrays()

    def train_alike(message: Message, context: Context) -> Message:
        after = {name: arrays[name].numpy() * np.float32(0.9) for name in SHAPES}
        return flower.vote(message, arrays, after, 1)

    flower.Votes(fraction_evaluate=0.0).start(
        InProcessGrid(train_alike, 3, keep), arrays, num_rounds=1
    )
    assert len(payloads) == 3


def test_a_start_whose_rounds_are_all_void_returns_the_first_arrays() -> None:
    strategy, arrays = flower.Votes(min_replies=4, fraction_evaluate=0.0), make_arrays()
    result = strategy.start(InProcessGrid(train, 3), arrays, num_rounds=2)
    assert [outcome.committed for outcome in strategy.outcomes] == [False, False]
    assert_equal(result.arrays, {name: arrays[name].numpy().ravel() for name in SHAPES})


def test_a_second_start_goes_on_with_its_result_or_with_a_saved_state() -> None:
    def make() -> flower.Votes:
        return flower.Votes(fraction_evaluate=0.0, momentum=0.9)

    straight = make().start(InProcessGrid(train, 3), make_arrays(), num_rounds=4)
    first = make()
    half = first.start(InProcessGrid(train, 3), make_arrays(), num_rounds=2)
    state = first.state_dict()

    def train_later(message: Message, context: Context) -> Message:
        # All messages of a round share their records.
        number = message.content["config"]["server-round"] + 2
        content = RecordDict({**message.content, "config": ConfigRecord({"server-round": number})})
        return train(Message(content=content, metadata=message.metadata), context)

    again = first.start(InProcessGrid(train_later, 3), half.arrays, num_rounds=2)
    second = make()
    second.load_state_dict(state)
    saved = ArrayRecord({name: Array(array.numpy()) for name, array in half.arrays.items()})
    resumed = second.start(InProcessGrid(train_later, 3), saved, num_rounds=2)
    for result in (again, resumed):
        assert_equal(
            result.arrays, {name: straight.arrays[name].numpy().ravel() for name in SHAPES}
        )


def test_a_second_start_with_other_arrays_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    strategy = flower.Votes(fraction_evaluate=0.0, momentum=0.9)
    first = strategy.start(InProcessGrid(train, 3), make_arrays(), num_rounds=2)
    again = strategy.start(InProcessGrid(train, 3), make_arrays(), num_rounds=2)
    assert "the arrays differ from the last round's: momentum begins with 0" in caplog.text
    assert_equal(again.arrays, {name: first.arrays[name].numpy().ravel() for name in SHAPES})
    assert [outcome.round for outcome in strategy.outcomes] == [0, 1, 0, 1]


def test_a_state_of_another_model_is_refused() -> None:
    strategy = flower.Votes(fraction_evaluate=0.0)
    with pytest.raises(InvalidArgumentError, match="before the first round"):
        strategy.state_dict()
    for number in (1, float("inf")):
        strategy.load_state_dict({"round": number, "reach": [], "momentum": {}})
        with pytest.raises(CheckpointError):
            strategy.start(InProcessGrid(train, 3), make_arrays(), num_rounds=1)


def test_wrong_use_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="momentum=2"):
        flower.Votes(momentum=2)
    with pytest.raises(InvalidArgumentError, match=r"before configure_train\(\)"):
        flower.Votes().aggregate_train(1, [])
    doubles = ArrayRecord({"weight": Array(np.zeros(3))})
    with pytest.raises(UnsupportedTypeError, match=r"weight is torch\.float64"):
        flower.Votes().start(InProcessGrid(train, 2), doubles, num_rounds=1)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rule": "residual", "context": None}, InvalidArgumentError, "Expected context="),
        ({"after": {}}, InvalidArgumentError, "after lacks weight"),
        ({"after": {"weight": "1"}}, UnsupportedTypeError, "weight is str"),
        (
            {"after": [np.zeros((70, 3))]},
            UnsupportedTypeError,
            "given as list; expected them by name",
        ),
        ({"num_examples": 0}, InvalidArgumentError, "num_examples=0"),
        ({"bare": "distlion"}, InvalidArgumentError, "does not ask for a vote"),
        ({"bare": "arrays"}, InvalidArgumentError, "0 records of arrays"),
        ({"rule": "residual", "state": ArrayRecord()}, InvalidArgumentError, "no residual for"),
    ],
)
def test_wrong_votes_are_named(change: dict[str, Any], error: type[Exception], match: str) -> None:
    caught: list[Exception] = []

    def train_wrong(message: Message, context: Context) -> Message:
        if "state" in change:
            context.state["distlion"] = change["state"]
        content = RecordDict(dict(message.content))
        content.pop(change.get("bare", ""), None)
        before = make_arrays()
        after = {name: before[name].numpy() * 2 for name in SHAPES}
        try:
            flower.vote(
                Message(content=content, metadata=message.metadata),
                before,
                change.get("after", after),
                change.get("num_examples", 1),
                context=change.get("context", context),
            )
        except error as found:
            caught.append(found)
        return Message(error=Error(code=1, reason="as asked"), reply_to=message)

    rule = change.get("rule", "stochastic")
    strategy = flower.Votes(rule=rule, fraction_evaluate=0.0)
    strategy.start(InProcessGrid(train_wrong, 2), make_arrays(), num_rounds=1)
    assert len(caught) == 2
    assert match in str(caught[0])
    (outcome,) = strategy.outcomes
    assert dataclasses.asdict(outcome)["refused"] == {Refusal.ERROR: 2}
    assert not outcome.committed
