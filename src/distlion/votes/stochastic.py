"""One bit up, with a probability that encodes the magnitude: stochastic signs of deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import Segment
from distlion.kernels.reference import Kernels
from distlion.votes.scaled import ScaledVote


@dataclass(frozen=True)
class StochasticVote(ScaledVote):
    """Vote plus with a probability that grows with the delta, so that small deltas count little.

    Equation:
        P(vote_i = 1) = (1 + d_i / max |d_i|) / 2, to 16 bits; the maximum is over the parameter
        x = x - lr * s * S,  S = sign(sum_i vote_i),  s = mean_i mean |d_i|
        (stochastic signs, arXiv:2002.10940, by the largest element in place of a constant)

    Only ``LocalSteps`` takes this rule.

    Notes:
        Sizes on the wire, the workers that count and ties are as in ``ScaledVote``. Randomness
        comes from the seed, the step, the worker and the element's number, equal on every machine.
    """

    def encode_scaled(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        coins: Coins,
        *,
        out: Tensor,
        scales: Tensor,
    ) -> Tensor:
        return kernels.encode_lots(segments, coins.lot, out=out, scales=scales)
