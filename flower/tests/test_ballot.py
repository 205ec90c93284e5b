"""A client's ballot: bitwise what a numpy oracle encodes, and about one bit a parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import ballots
import client_oracle
from distlion.errors import InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from distlion.kernels import Coins
from distlion_flower import RULES, Call, Places, cast_ballot, find_deltas

PLACES = Places.of(ballots.make_params())


@pytest.mark.parametrize("reach", [(), (0.5, 0.0, 1e-3, 1e30)])
@pytest.mark.parametrize("rule", RULES)
def test_ballots_equal_the_oracle(rule: str, reach: tuple[float, ...]) -> None:
    kept = [torch.zeros(PLACES.shapes[number]) for number in PLACES.bucket.members]
    expected_kept = [each.reshape(-1).numpy().copy() for each in kept]
    for number in range(5):
        call = Call(number, rule, 2.5, reach if rule == "stochastic" else ())
        deltas = ballots.make_deltas(PLACES, number)
        ballot = cast_ballot(
            call, PLACES, deltas, 3, node=9, coins=Coins(11, number, 9), residuals=kept
        )
        expected = client_oracle.encode(
            rule,
            [delta.reshape(-1).numpy() for delta in deltas],
            expected_kept,
            spread=2.5,
            reach=call.reach,
            seed=11,
            round_number=number,
            voter=9,
        )
        assert ballot.payload == expected
        for own, other in zip(kept, expected_kept, strict=True):
            assert own.reshape(-1).numpy().tobytes() == other.tobytes()


def test_stochastic_signs_have_the_delta_for_their_mean() -> None:
    places = Places.of({"w": torch.zeros(41)})
    delta = torch.linspace(-2, 2, 41)
    call, total, rounds = Call(0, "stochastic", 1.0, (1.5,)), torch.zeros(41), 4000
    for number in range(rounds):
        ballot = cast_ballot(
            dataclasses.replace(call, round=number),
            places,
            [delta],
            1,
            node=0,
            coins=Coins(3, number, 0),
        )
        signs, _ = client_oracle.read_payload(ballot.payload, [41])
        total += 1.5 * torch.from_numpy(signs[0]).float()
    # The standard error of a mean of +-1.5 is 1.5 / sqrt(4000) = 0.024; 41 of them stay within 4.
    assert (total / rounds - delta.clamp(-1.5, 1.5)).abs().max() < 4 * 0.024


@pytest.mark.smoke
def test_a_ballot_has_about_one_bit_for_each_parameter() -> None:
    shapes = {"a": (300, 64), "b": (64,), "c": (64, 100), "d": (10,)}
    places = Places.of({name: torch.zeros(shape) for name, shape in shapes.items()})
    deltas = [torch.randn(shape) for shape in shapes.values()]
    ballot = cast_ballot(
        Call(0, "stochastic", 3.0), places, deltas, 1, node=0, coins=Coins(0, 0, 0)
    )
    assert 1 <= 8 * len(ballot.payload) / places.n_elements < 1.04


def test_ballots_of_other_coins_differ() -> None:
    call, deltas = Call(0, "stochastic", 3.0), ballots.make_deltas(PLACES, 0)
    drawn = {
        cast_ballot(call, PLACES, deltas, 1, node=0, coins=coins).payload
        for coins in (Coins(0, 0, 0), Coins(1, 0, 0), Coins(0, 0, 1), Coins(0, 1, 0))
    }
    assert len(drawn) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_delta_that_is_not_finite_is_an_error_and_residuals_stay(value: float) -> None:
    deltas = ballots.make_deltas(PLACES, 0)
    deltas[3][5] = value
    kept = [torch.ones(PLACES.shapes[number]) for number in PLACES.bucket.members]
    with pytest.raises(NonFiniteError, match="the delta of long is not finite"):
        cast_ballot(
            Call(4, "residual", 1.0),
            PLACES,
            deltas,
            1,
            node=6,
            coins=Coins(0, 4, 6),
            residuals=kept,
        )
    assert all((each == 1).all() for each in kept)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"n_examples": 0}, InvalidArgumentError),
        ({"n_examples": 2.0}, UnsupportedTypeError),
        ({"n_examples": True}, UnsupportedTypeError),
        ({"n_examples": 1 << 53}, InvalidArgumentError),
        ({"call": Call(0, "residual", 1.0)}, InvalidArgumentError),
        ({"call": Call(0, "stochastic", 1.0, (1.0,))}, InvalidArgumentError),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    given = {"call": Call(0, "majority", 1.0), "n_examples": 1, **changes}
    with pytest.raises(error):
        cast_ballot(
            given["call"],
            PLACES,
            ballots.make_deltas(PLACES, 0),
            given["n_examples"],
            node=0,
            coins=Coins(0, 0, 0),
        )


def test_a_rule_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="by rule 'mean'"):
        Call(0, "mean", 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": None},
        {"round": True},
        {"spread": 0.0},
        {"spread": float("nan")},
        {"spread": None},
        {"reach": (0.5, float("nan"))},
        {"reach": (-1.0,)},
        {"reach": ("1",)},
    ],
)
def test_a_call_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    given = {"round": 0, "rule": "stochastic", "spread": 1.0, **changes}
    with pytest.raises(InvalidArgumentError, match="the server asks for a vote in round"):
        Call(**given)


def test_the_number_of_examples_may_be_of_numpy() -> None:
    call, deltas = Call(0, "majority", 1.0), ballots.make_deltas(PLACES, 0)
    cast = [
        cast_ballot(call, PLACES, deltas, number, node=0, coins=Coins(0, 0, 0))
        for number in (7, np.int64(7), torch.tensor(7))
    ]
    assert cast == cast[:1] * 3
    assert all(type(each.n_examples) is int for each in cast)


def test_deltas_are_before_less_after_in_float32() -> None:
    before = {"w": torch.tensor([1.0, 2.0]).half(), "e": torch.zeros(0)}
    after = {"w": torch.tensor([0.75, 2.5]), "e": torch.zeros(0)}
    places = Places.of(before)
    (delta,) = find_deltas(places, before, after)
    assert torch.equal(delta, torch.tensor([0.25, -0.5]))


def test_what_does_not_fit_the_model_of_the_server_is_refused() -> None:
    before = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    places = Places.of(before)
    with pytest.raises(InvalidArgumentError, match="after lacks b"):
        find_deltas(places, before, {"w": torch.zeros(2, 3)})
    with pytest.raises(InvalidArgumentError, match=r"b has the shape \(3,\) in after"):
        find_deltas(places, before, {"w": torch.zeros(2, 3), "b": torch.zeros(3)})
    with pytest.raises(InvalidArgumentError, match="w is one tensor before and after"):
        find_deltas(places, before, before)
