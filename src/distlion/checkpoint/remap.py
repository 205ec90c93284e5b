"""Rules that remap momenta if the number of workers changes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from distlion.errors import CheckpointError, InvalidArgumentError

WorldChange = Literal["raise", "mean", "map", "reset"]
WORLD_CHANGES: tuple[WorldChange, ...] = get_args(WorldChange)

Share = tuple[int, Fraction]
"""A saved voter, and the weight of its momentum."""


def check_world_change(on_world_change: str) -> None:
    """Raise InvalidArgumentError unless it names a rule."""
    if on_world_change not in WORLD_CHANGES:
        raise InvalidArgumentError(
            f"on_world_change={on_world_change!r}: expected one of {', '.join(WORLD_CHANGES)}"
        )


def share_out(voter: int, *, saved: int, present: int, rule: WorldChange) -> list[Share]:
    """List the saved momenta that a voter begins with; an empty list stands for zeros.

    Equation, from W = ``saved`` voters to W' = ``present``, for voter j:
        equal numbers   m'_j = m_j, under every rule
        "mean"          m'_j = (1 / W) sum_i m_i: keeps the direction of global Lion
        "map"           m'_j = the mean of the m_i over [j W / W', (j + 1) W / W'), voter i being
                        the interval [i, i + 1): each neighborhood keeps its own, and the mean of
                        all is unchanged
        "reset"         m'_j = 0

    Raises:
        CheckpointError: The numbers differ, and the rule is "raise".
    """
    if saved == present:
        return [(voter, Fraction(1))]
    if rule == "raise":
        raise CheckpointError(
            f"the checkpoint holds the momenta of {saved} workers, and now there are {present}; "
            "say what they begin with: on_world_change='map' (each the mean of its neighborhood), "
            "'mean' (all the same mean) or 'reset' (zeros); with distlion train --on-world-change, "
            "with a VotingMixin the attribute of the class"
        )
    if rule == "reset":
        return []
    if rule == "mean":
        return [(number, Fraction(1, saved)) for number in range(saved)]
    width = Fraction(saved, present)
    start, stop = voter * width, (voter + 1) * width
    shares = []
    for number in range(int(start), -int(-stop // 1)):
        overlap = min(stop, Fraction(number + 1)) - max(start, Fraction(number))
        shares.append((number, overlap / width))
    return shares


def keep_shares(shares: Sequence[Share]) -> list[Share]:
    """Scale the weights of some of the shares so that they add up to 1."""
    total = sum((weight for _, weight in shares), Fraction(0))
    return [(number, weight / total) for number, weight in shares]


def mix_momenta(momenta: Sequence[Tensor], shares: Sequence[Share]) -> Tensor:
    """Return the weighted sum in the momenta's dtype, added in float64 in voter order."""
    if len(shares) == 1:
        return momenta[0].clone()
    total = torch.zeros(momenta[0].shape, dtype=torch.float64, device="cpu")
    for momentum, (_, weight) in zip(momenta, shares, strict=True):
        total += momentum.double() * float(weight)
    return total.to(momenta[0].dtype)
