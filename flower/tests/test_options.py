"""Metrics and options that the strategy shares with Flower's FedAvg, and what users see."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is tested in an environment of its own")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion_flower import bridge as flower
from in_process import InProcessGrid

ONES = {"w": np.ones(70, np.float32)}


def make_arrays() -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in ONES.items()})


def train(message: Message, context: Context) -> Message:
    """Vote with 10 examples for each node's number, and report that number."""
    after = {"w": np.zeros(70, np.float32)}
    metrics = {"loss": 1.0, "node": context.node_id, "losses": [1.0, float(context.node_id)]}
    return flower.vote(message, make_arrays(), after, 10 * context.node_id, metrics=metrics)


def start(
    strategy: flower.Votes, *, train: Any = train, nodes: int = 3, num_rounds: int = 1
) -> Any:
    return strategy.start(InProcessGrid(train, nodes), make_arrays(), num_rounds=num_rounds)


def test_metrics_of_those_counted_are_averaged_by_votes() -> None:
    alike = start(flower.Votes(weights="equal", fraction_evaluate=0.0))
    assert dict(alike.train_metrics_clientapp[1]) == {"loss": 1.0, "node": pytest.approx(2)}
    # 10, 20 and 30 examples, up to the median one.
    strategy = flower.Votes(weights="examples", max_weight=1.0, fraction_evaluate=0.0)
    weighed = start(strategy)
    expected = (10 * 1 + 20 * 2 + 20 * 3) / 50
    assert weighed.train_metrics_clientapp[1]["node"] == pytest.approx(expected)


def test_functions_of_the_user_average_metrics_of_replies_taken() -> None:
    seen = []

    def average(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.append([content["metrics"][key] for content in contents])
        return MetricRecord({"most": max(content["metrics"]["losses"][1] for content in contents)})

    def lose_one(replies: list[Message]) -> list[Message]:
        first, _, third = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        return [third, first, first]

    strategy = flower.Votes(train_metrics_aggr_fn=average, fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(train, 3, lose_one), make_arrays(), num_rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == {"most": 3.0}
    assert seen == [[10, 30]]


def evaluate(name: str = "metrics", **numbers: Any) -> Message:
    asked = Message(content=RecordDict(), dst_node_id=1, message_type="evaluate")
    return Message(content=RecordDict({name: MetricRecord(numbers)}), reply_to=asked)


def make_evaluations() -> list[Message]:
    asked = Message(content=RecordDict(), dst_node_id=1, message_type="evaluate")
    return [
        evaluate(**{"num-examples": 1, "accuracy": 1.0}),
        evaluate("found", **{"num-examples": 3, "accuracy": 0.2, "more": 1.0}),
        evaluate(accuracy=0.0),
        evaluate(**{"num-examples": [3], "accuracy": 0.0}),
        Message(content=RecordDict(), reply_to=asked),
        Message(error=Error(code=1, reason="no data here"), reply_to=asked),
    ]


def test_evaluations_of_any_content_are_averaged_where_they_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = flower.Votes(fraction_evaluate=0.0)
    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        found = strategy.aggregate_evaluate(1, make_evaluations())
    assert found is not None
    assert dict(found) == {"accuracy": pytest.approx(0.4)}
    assert caplog.text.count("is not taken: it has no num-examples") == 3
    assert "no data here" in caplog.text
    assert strategy.aggregate_evaluate(1, []) is None


def test_a_client_that_claims_many_examples_does_not_decide_an_evaluation() -> None:
    strategy = flower.Votes(max_weight=2.0, fraction_evaluate=0.0)
    honest = [evaluate(**{"num-examples": 10, "accuracy": 0.5}) for _ in range(4)]
    found = strategy.aggregate_evaluate(
        1, [*honest, evaluate(**{"num-examples": 1 << 62, "accuracy": 1e6})]
    )
    assert found is not None
    # Its weight is that of two of the four others.
    assert dict(found) == {"accuracy": pytest.approx((4 * 0.5 + 2 * 1e6) / 6)}


def test_a_function_of_the_user_averages_evaluations() -> None:
    def count(contents: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"n": len(contents)})

    strategy = flower.Votes(evaluate_metrics_aggr_fn=count, fraction_evaluate=0.0)
    assert strategy.aggregate_evaluate(1, make_evaluations()) == MetricRecord({"n": 2})
    assert strategy.aggregate_evaluate(1, []) is None


@pytest.mark.parametrize(
    "option",
    [
        {"weighted_by_key": "n"},
        {"arrayrecord_key": "distlion"},
        {"configrecord_key": "distlion"},
    ],
)
def test_keys_that_would_be_ignored_or_overwritten_are_refused(option: dict[str, str]) -> None:
    [(name, value)] = option.items()
    with pytest.raises(InvalidArgumentError, match=f"{name}='{value}'"):
        flower.Votes(**option)


def test_other_keys_are_those_of_the_messages() -> None:
    def train_weights(message: Message, context: Context) -> Message:
        assert message.content["settings"]["server-round"] == 1
        after = {"w": np.zeros(70, np.float32)}
        return flower.vote(message, message.content["weights"], after, 1)

    strategy = flower.Votes(
        arrayrecord_key="weights", configrecord_key="settings", fraction_evaluate=0.0
    )
    start(strategy, train=train_weights)
    assert strategy.outcomes[0].committed


def test_reasons_of_failures_and_counts_are_in_flowers_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(message: Message, context: Context) -> Message:
        if context.node_id == 2:
            return Message(error=Error(code=1, reason="out of memory"), reply_to=message)
        return train(message, context)

    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        start(flower.Votes(rule="majority", fraction_evaluate=0.0), train=fail)
    assert "error in reply from node 2: out of memory" in caplog.text
    assert "Votes: 2 taken, 0 lost, 1 refused (the client failed); round committed" in caplog.text
    assert "rule='majority'" in caplog.text


def test_metrics_may_be_numbers_of_numpy_and_torch() -> None:
    def train_typed(message: Message, context: Context) -> Message:
        metrics = {"a": np.float32(0.5), "b": torch.tensor(2), "num-examples": 4}
        return flower.vote(message, make_arrays(), {"w": torch.zeros(70)}, 4, metrics=metrics)

    result = start(flower.Votes(fraction_evaluate=0.0), train=train_typed)
    assert dict(result.train_metrics_clientapp[1]) == {"a": 0.5, "b": 2.0}


@pytest.mark.parametrize(
    ("metrics", "error", "match"),
    [
        ({"loss": "low"}, UnsupportedTypeError, "loss: str"),
        ({"loss": torch.zeros(3)}, UnsupportedTypeError, "loss: Tensor"),
        ([0.5], UnsupportedTypeError, "metrics is list"),
        ({"num-examples": 9}, InvalidArgumentError, "num-examples=9; expected num_examples=4"),
    ],
)
def test_a_vote_with_wrong_metrics_leaves_what_the_client_keeps(
    metrics: Any, error: type[Exception], match: str
) -> None:
    kept: list[Any] = []

    def train_wrong(message: Message, context: Context) -> Message:
        after, wrong = {"w": np.linspace(0, 1, 70, dtype=np.float32)}, metrics
        if message.content["config"]["server-round"] == 1:
            return flower.vote(message, make_arrays(), after, 4, context=context)
        before = context.state["distlion"]["w"].numpy().copy()
        with pytest.raises(error, match=match):
            flower.vote(message, make_arrays(), after, 4, context=context, metrics=wrong)
        kept.append((before, context.state["distlion"]["w"].numpy()))
        return Message(error=Error(code=1, reason="as asked"), reply_to=message)

    strategy = flower.Votes(rule="residual", fraction_evaluate=0.0)
    start(strategy, train=train_wrong, nodes=2, num_rounds=2)
    assert len(kept) == 2
    assert all(before.any() and np.array_equal(before, after) for before, after in kept)


@pytest.mark.parametrize("dtype", ["complex64", ">f4", "longdouble"])
def test_arrays_of_no_float_of_torchs_are_refused_and_not_left_untrained(dtype: str) -> None:
    arrays = ArrayRecord({**make_arrays(), "phase": Array(np.zeros(3, dtype))})
    with pytest.raises(UnsupportedTypeError, match=f"phase is {np.dtype(dtype)}"):
        flower.Votes().start(InProcessGrid(train, 2), arrays, num_rounds=1)


def test_arithmetic_on_an_array_without_dimensions_may_make_a_number_of_numpys() -> None:
    def train_scale(message: Message, context: Context) -> Message:
        before = message.content["arrays"]
        return flower.vote(message, before, {"scale": before["scale"].numpy() - 1}, 1)

    arrays = ArrayRecord({"scale": Array(np.array(3, np.float32))})
    result = flower.Votes(fraction_evaluate=0.0).start(
        InProcessGrid(train_scale, 2), arrays, num_rounds=1
    )
    assert result.arrays["scale"].numpy() < 3


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.other = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_is_named_and_left_out_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def train_all(message: Message, context: Context) -> Message:
        before = message.content["arrays"]
        after = {name: array.numpy() - np.float32(0.1) for name, array in before.items()}
        return flower.vote(message, before, after, 1)

    state = Tied().state_dict()
    for expected in (1, 0):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="distlion"):
            flower.Votes(fraction_evaluate=0.0).start(
                InProcessGrid(train_all, 2), ArrayRecord(state), num_rounds=2
            )
        said = [record.message for record in caplog.records if "tied weight" in record.message]
        assert len(said) == expected
        assert all(each.startswith("embedding.weight and head.weight have") for each in said)
        state.pop("head.weight", None)


def test_a_loaded_state_is_returned_before_the_first_round() -> None:
    first = flower.Votes(fraction_evaluate=0.0)
    start(first)
    second = flower.Votes()
    second.load_state_dict(first.state_dict())
    state, expected = second.state_dict(), first.state_dict()
    assert (state["round"], state["reach"]) == (expected["round"], expected["reach"])
    assert torch.equal(state["momentum"]["w"], expected["momentum"]["w"])


def test_outcomes_are_kept_of_so_many_rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "MOST_OUTCOMES", 3)
    strategy = flower.Votes(fraction_evaluate=0.0)
    start(strategy, num_rounds=5)
    assert [outcome.round for outcome in strategy.outcomes] == [2, 3, 4]


def train_a_norm(message: Message, context: Context) -> Message:
    """Vote with other parameters, and other statistics too."""
    before = message.content["arrays"]
    after = {name: array.numpy() - 2 for name, array in before.items()}
    return flower.vote(message, before, after, 10)


def make_norm() -> ArrayRecord:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return ArrayRecord(model.state_dict())


def test_running_statistics_are_refused_by_name_or_stay() -> None:
    grid, arrays = InProcessGrid(train_a_norm, 3), make_norm()
    strategy = flower.Votes(fraction_evaluate=0.0)
    with pytest.raises(InvalidArgumentError, match=r"1\.running_mean and 1 more.*GroupNorm.*keep"):
        strategy.start(grid, arrays, num_rounds=1)
    keeping = flower.Votes(fraction_evaluate=0.0, statistics="keep")
    found = keeping.start(grid, arrays, num_rounds=2).arrays
    assert keeping.outcomes[-1].committed
    for name, array in arrays.items():
        is_kept = name.endswith(("running_mean", "running_var", "num_batches_tracked"))
        assert np.array_equal(array.numpy(), found[name].numpy()) == is_kept, name
    with pytest.raises(InvalidArgumentError, match="statistics"):
        flower.Votes(statistics="vote")  # type: ignore[arg-type]
