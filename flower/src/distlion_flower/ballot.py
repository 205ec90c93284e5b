"""A client's part of a round: from its local steps to the bytes that it sends."""

from __future__ import annotations

import operator
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from distlion.kernels import (
    FLOAT32_MAX,
    Coefficients,
    Coins,
    Kernels,
    Segment,
    choose_kernels,
)
from distlion.votes import ResidualVote, Roster, ScaledVote
from distlion.votes.aggregation import Aggregation
from distlion_flower.places import Places

RULES = ("stochastic", "majority", "residual")
RESIDUAL = ResidualVote.worker_state[0]
MOST_EXAMPLES = 1 << 53
# A delta is a direction by itself, without a momentum before the vote.
_COEFFICIENTS = Coefficients(beta1=0.0, beta2=0.0, lr=1.0, weight_decay=0.0)
_ALONE = Roster.of(1)


@dataclass(frozen=True)
class Call:
    """Facts of a round that each client gets with the parameters.

    Attributes:
        round: Number of the round, from 0.
        rule: One of ``RULES``.
        spread: Reach of a vote in units of the mean magnitude of a delta, for "stochastic".
        reach: b of each parameter with elements, for "stochastic"; empty in the first round.

    Raises:
        InvalidArgumentError: A value is out of range, or has a wrong type.
    """

    round: int
    rule: str
    spread: float
    reach: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InvalidArgumentError(
                f"the server asks for votes by rule {self.rule!r}; expected one of "
                f"{', '.join(map(repr, RULES))}. Use one version of distlion on both sides"
            )
        numbers = (self.round, self.spread, *self.reach)
        if not all(_is_finite(number) for number in numbers) or self.spread == 0:
            raise InvalidArgumentError(
                f"the server asks for a vote in round {self.round!r} with spread={self.spread!r} "
                f"and {len(self.reach)} reaches, of which one is not a finite number of 0 or more. "
                "Use one version of distlion on both sides"
            )


@dataclass(frozen=True)
class Ballot:
    """A client's vote, as sent. The server checks all of it before use.

    Attributes:
        round, rule: Round and rule of the answered call.
        node: The client's number.
        n_examples: Number of examples that it has trained on.
        payload: Bits and scales in the format of ``BucketVote.encode``.
        checksum: Checksum of all of these.
    """

    round: Any
    rule: Any
    node: Any
    n_examples: Any
    payload: Any
    checksum: Any


def compute_checksum(round_number: int, rule: str, node: int, n_examples: int, data: bytes) -> int:
    """Compute the CRC-32 of a ballot; it detects accidents, not attackers."""
    numbers = [number % (1 << 64) for number in (round_number, node, n_examples)]
    return zlib.crc32(data, zlib.crc32(struct.pack("<3Q", *numbers) + rule.encode()))


def cast_ballot(
    call: Call,
    places: Places,
    deltas: Sequence[Tensor],
    n_examples: int,
    *,
    node: int,
    coins: Coins,
    residuals: Sequence[Tensor] = (),
) -> Ballot:
    """Vote on a client's deltas.

    Equation:
        "stochastic"  P(bit = 1) = (1 + clip(d / b, -1, 1)) / 2, to 16 bits: the sign of d + u, u
                      uniform in (-b, b); b = reach, or spread * mean |d| in the first round
                      (z-SignFedAvg, arXiv:2302.02589, with z = infinity)
        "majority"    bit = sign(d), 0 by the client's coin
        "residual"    r = d + e; bit = sign(r), q = sign(r) * mean |r|; e <- r - q
                      (EF-signSGD, arXiv:1901.09847)
        scale         mean |d| of each parameter; mean |r| for "residual"

    Args:
        call: The server's call.
        places: Places of the parameters.
        deltas: Deltas from ``find_deltas``.
        n_examples: Number of examples that the client has trained on, 1 or more.
        node: The client's number.
        coins: The client's random bits of this round.
        residuals: e of each delta for "residual", float32 on the CPU, zeros at first. Overwritten.

    Raises:
        InvalidArgumentError: A number is out of range, or residuals are missing.
        NonFiniteError: A delta is not finite; residuals are unchanged.
        UnsupportedTypeError: ``n_examples`` is not an integer.
    """
    n_examples = _check_examples(n_examples)
    rule = _make_rule(call, len(deltas))
    if call.rule == "residual" and len(residuals) != len(deltas):
        raise InvalidArgumentError(
            f"rule 'residual' has {len(residuals)} residuals for {len(deltas)} parameters. "
            "Expected one for each. Keep them from round to round, zeros at first"
        )
    device = deltas[0].device
    kept = [{RESIDUAL: each.to(device)} for each in residuals]
    vote = rule.start(places.bucket, _ALONE)
    zeros = torch.zeros(max(delta.numel() for delta in deltas), dtype=torch.float32, device=device)
    segments = [
        Segment(slot, delta, delta, zeros[: delta.numel()], _COEFFICIENTS)
        for slot, delta in zip(places.bucket.slots, map(_flatten, deltas), strict=True)
    ]
    votes, finite = vote.encode(choose_kernels(device), segments, kept, coins, device=device)
    flags = finite.tolist()
    if not all(flags):
        name = places.bucket.slots[flags.index(False)].name
        raise NonFiniteError(
            f"the delta of {name} is not finite after the local steps. Expected finite weights. "
            "Lower the local learning rate, or send no vote",
            rank=node,
            step=call.round,
            culprits=(node,),
        )
    vote.note()
    for own, moved in zip(residuals, kept, strict=True):
        own.copy_(moved[RESIDUAL])
    data = votes.cpu().numpy().tobytes()
    checksum = compute_checksum(call.round, call.rule, node, n_examples, data)
    return Ballot(call.round, call.rule, node, n_examples, data, checksum)


@dataclass(frozen=True)
class _ReachingVote(ScaledVote):
    """Stochastic signs with the server's reach, or with a reach of ``spread`` mean magnitudes."""

    spread: float = 1.0
    reach: tuple[float, ...] = ()

    def encode_scaled(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        coins: Coins,
        *,
        out: Tensor,
        scales: Tensor,
    ) -> Tensor:
        return kernels.encode_lots(
            segments,
            coins.lot,
            out=out,
            scales=scales,
            reach=self.reach,
            spread=self.spread,
        )


def _make_rule(call: Call, n_deltas: int) -> Aggregation:
    if call.rule == "majority":
        return ScaledVote()
    if call.rule == "residual":
        return ResidualVote(bits=1)
    if call.reach and len(call.reach) != n_deltas:
        raise InvalidArgumentError(
            f"the server sent a reach for {len(call.reach)} parameters, and {n_deltas} are voted "
            "on. Expected equal numbers. Use the server's model"
        )
    return _ReachingVote(call.spread, call.reach)


def _check_examples(n_examples: int) -> int:
    """Return a number of examples as a Python integer; numpy integers are accepted too."""
    try:
        number = operator.index(n_examples)
    except TypeError:
        number = None
    if number is None or isinstance(n_examples, bool):
        raise UnsupportedTypeError(f"num_examples={n_examples!r}: expected an integer")
    if not 1 <= number < MOST_EXAMPLES:
        raise InvalidArgumentError(
            f"num_examples={number}: expected 1 to {MOST_EXAMPLES - 1:,}. A client without "
            "examples has no vote"
        )
    return number


def _is_finite(number: object) -> bool:
    """Return True for a number of 0 or more that is finite as a float32."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number <= FLOAT32_MAX


def _flatten(delta: Tensor) -> Tensor:
    return delta.contiguous().view(-1)
