"""Clients of a server under test: deltas by the seed, ballots, and what may happen to them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_oracle import Sent
from distlion.kernels import Coins
from distlion_flower import Ballot, Call, Places, ServerSettings, VoteServer, cast_ballot
from distlion_flower.ballot import compute_checksum

SHAPES = {"weight": (70, 3), "bias": (5,), "empty": (0,), "scalar": (), "long": (517,)}


def make_params(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_server(**settings: Any) -> VoteServer:
    return VoteServer(make_params(), ServerSettings(**settings))


def make_deltas(places: Places, seed: int) -> list[Tensor]:
    """Return deltas of many magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    deltas = []
    for number in places.bucket.members:
        delta = torch.randn(places.shapes[number], generator=generator) * 10.0 ** -(number % 4)
        deltas.append(delta * (torch.rand(delta.shape, generator=generator) > 0.1))
    return deltas


def make_ballot(
    server: VoteServer,
    call: Call,
    node: int,
    *,
    n_examples: int = 10,
    residuals: list[Tensor] | None = None,
) -> Ballot:
    """Return the ballot of a node; its deltas are those of its number and the round's."""
    deltas = make_deltas(server.places, 1000 * node + call.round)
    if residuals is None:
        residuals = [torch.zeros(delta.shape) for delta in deltas]
    coins = Coins(7, call.round, node)
    kept = residuals if call.rule == "residual" else ()
    return cast_ballot(
        call, server.places, deltas, n_examples, node=node, coins=coins, residuals=kept
    )


def cast(
    server: VoteServer,
    call: Call,
    node: int,
    deltas: list[Tensor],
    *,
    residuals: Sequence[Tensor] = (),
) -> Ballot:
    """Return the ballot of a node with these deltas, of one example."""
    coins = Coins(7, call.round, node)
    return cast_ballot(call, server.places, deltas, 1, node=node, coins=coins, residuals=residuals)


def as_sent(ballot: Ballot) -> Sent:
    return Sent(ballot.node, ballot.n_examples, ballot.payload)


def damage(ballot: Ballot, rng: random.Random) -> Ballot:
    """Return another ballot: a bit flipped somewhere, or a field or its kind changed."""
    damaged = ballot
    while is_same(damaged, ballot):
        damaged = _change(ballot, rng)
    return damaged


def resign(ballot: Ballot, **changes: Any) -> Ballot:
    """Change a ballot as a client would that lies, and not an accident: its checksum is right."""
    changed = dataclasses.replace(ballot, **changes)
    checksum = compute_checksum(
        changed.round, changed.rule, changed.node, changed.n_examples, changed.payload
    )
    return dataclasses.replace(changed, checksum=checksum)


def lie(ballot: Ballot, rng: random.Random) -> Ballot:
    """Return a ballot with a right checksum that must not count."""
    payload, kind = ballot.payload, rng.randrange(4)
    if kind == 0:  # scales are the last bytes, one for each parameter with elements
        scale = np.float32(rng.choice([np.nan, np.inf, -np.inf, -1e-6, 1e30]))
        at = len(payload) - 64 + 4 * rng.randrange(4)
        return resign(ballot, payload=payload[:at] + scale.tobytes() + payload[at + 4 :])
    if kind == 1:
        cut = rng.randrange(len(payload))
        return resign(ballot, payload=rng.choice([payload[:cut], payload + rng.randbytes(8)]))
    if kind == 2:
        return resign(ballot, n_examples=rng.choice([0, -1, -(2**40)]))
    name = rng.choice(["round", "node"])
    return resign(ballot, **{name: getattr(ballot, name) + rng.choice([-1, 1, 2**32])})


def _change(ballot: Ballot, rng: random.Random) -> Ballot:
    spoiled: list[Any] = [None, True, 1.5, "5", b"", [], -1, 0, 2**64, 2**70, float("nan")]
    field = rng.choice(["round", "rule", "node", "n_examples", "payload", "checksum"])
    value = getattr(ballot, field)
    if field == "payload" and rng.random() < 0.8:
        data = bytearray(value)
        kind = rng.randrange(4)
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[rng.randrange(len(data)) :]
        elif kind == 2:
            data += rng.randbytes(rng.randint(1, 70))
        else:
            return dataclasses.replace(ballot, payload=rng.choice([data, memoryview(data), None]))
        return dataclasses.replace(ballot, payload=bytes(data))
    if isinstance(value, int) and rng.random() < 0.5:
        return dataclasses.replace(ballot, **{field: value ^ (1 << rng.randrange(40))})
    return dataclasses.replace(ballot, **{field: rng.choice(spoiled)})


def is_same(one: Ballot, other: Ballot) -> bool:
    """True if two ballots are equal, also in the types of what they hold."""
    return all(
        type(vars(one)[name]) is type(vars(other)[name]) and vars(one)[name] == vars(other)[name]
        for name in vars(one)
    )


def to_numpy(params: dict[str, Tensor]) -> dict[str, Any]:
    """Return the parameters that have elements, flat."""
    return {name: x.reshape(-1).numpy().copy() for name, x in params.items() if x.numel()}


def assert_equal(server: VoteServer, expected: dict[str, Any]) -> None:
    for name, param in to_numpy(server.params).items():
        np.testing.assert_array_equal(param.view(np.int32), expected[name].view(np.int32))
