"""A few bits up, one bit down: votes with a quantized magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.coin import Coins
from distlion.kernels.contract import FLOAT32_MAX, ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.numpy_numbers import keep_as_python
from distlion.votes.aggregation import Aggregation

MAX_BITS = 8

# Smallest error against global Lion, 2026-11-21: benchmarks/results/quantized_step.json.
DEFAULT_STEPS: dict[str, tuple[float, ...]] = {
    "l1": (1.0, 0.84, 0.71, 0.42, 0.30, 0.18, 0.15, 0.125),
    "linf": (1.0, 0.074, 0.053, 0.044, 0.026, 0.016, 0.0093, 0.0055),
}


@dataclass(frozen=True)
class QuantizedVote(Aggregation):
    """Move every element with the sign of the sum of p-bit votes.

    Equation:
        vote_i = sign(c_i) * (2 a_i + 1), a_i = min(floor(|c_i| / (s_i * step)), 2^(p-1) - 1)
        S = sign(sum_i vote_i)
        s_i: mean |c_i| ("l1") or max |c_i| ("linf") over 4,096 elements of one parameter
        (Lion Cub, arXiv:2411.16462: p-bit votes scaled by the L1 norm. Odd levels are ours.)

    Args:
        bits: p, 1 to 8. One bit is bitwise identical to ``MajorityVote()``.
        norm: Scale of a vote, "l1" or "linf". Directions have long tails, so the maximum rounds
            nearly all elements to the lowest level; the mean keeps the information.
        step: Width of a level in units of s, > 0; None takes ``DEFAULT_STEPS``, see
            docs/explanation/algorithm.md.

    Raises:
        InvalidArgumentError: A value is out of range.
        UnsupportedTypeError: ``bits`` is not an integer.

    Notes:
        No scale is sent: only the sign of the sum counts, and no worker can outvote the others.
        Ties and directions of exactly 0 take the coins of ``MajorityVote``.
    """

    vote_format = VoteFormat.LEVEL
    reply_format = ReplyFormat.SIGN

    bits: int = 4
    norm: Literal["l1", "linf"] = "l1"
    step: float | None = None

    def __post_init__(self) -> None:
        keep_as_python(self, "bits", "step")
        if not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise UnsupportedTypeError(f"QuantizedVote(bits={self.bits!r}): expected an integer")
        if not 1 <= self.bits <= MAX_BITS:
            raise InvalidArgumentError(f"QuantizedVote(bits={self.bits}): expected 1 to {MAX_BITS}")
        if self.norm not in ("l1", "linf"):
            raise InvalidArgumentError(
                f"QuantizedVote(norm={self.norm!r}): expected 'l1' or 'linf'"
            )
        if self.step is not None and not isinstance(self.step, int | float):
            raise UnsupportedTypeError(f"QuantizedVote(step={self.step!r}): expected a number")
        if self.step is not None and not 0 < self.step <= FLOAT32_MAX:
            raise InvalidArgumentError(
                "QuantizedVote(step=...): expected a finite number above 0, of at most "
                f"{FLOAT32_MAX:.4g}, or None"
            )

    @property
    def level_width(self) -> float:
        """``step``, or its default for these bits and this norm."""
        return DEFAULT_STEPS[self.norm][self.bits - 1] if self.step is None else self.step

    @property
    def vote_planes(self) -> int:
        return self.bits

    def reply_planes(self, n_votes: int) -> int:
        return 1

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        return kernels.encode_levels(
            segments, coins.zero, norm=self.norm, step=self.level_width, out=out
        )

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        kernels.count_levels(votes, coins.tie, out=out)
