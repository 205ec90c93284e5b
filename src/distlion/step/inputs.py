"""The inputs of a step: read once, and shared by all its buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from distlion.failures import Status
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients
from distlion.step.outcome import describe_problem
from distlion.wire.frame import Header
from distlion.wire.verdict import with_error

NoteNorm = Callable[[float], None]
"""Function called with the norm of a step's gradients, before they are scaled."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs that all buckets of one step share.

    Attributes:
        rank: This rank among all workers.
        header: Its header, still without a bucket.
        coins: Its coins of this step.
        rounding: The coin of stochastic rounding; None to round to nearest.
        coefficients: Hyperparameters of every param group.
        nonfinite: The policy for values that are not finite.
        found_inf: Whether a GradScaler has seen an overflow on this worker.
        wants_digest: Whether raw gradients are to be compared between workers.
        note_norm: Function called by a commit with the norm of clipping, if any.
        after_encode: Function called once a vote is encoded, if a fault is armed.
        keeps_directions: Whether cut matrices' directions are needed after the vote.
        is_excluded: Whether this worker's votes do not count, while its momenta go on.
        problems: Reasons why this worker cannot vote; more may be added on the way.
    """

    rank: int
    header: Header
    coins: Coins
    rounding: Coin | None
    coefficients: Sequence[Coefficients]
    nonfinite: Literal["raise", "skip", "abstain"]
    found_inf: bool
    wants_digest: bool
    note_norm: NoteNorm
    after_encode: Callable[[], None]
    keeps_directions: bool = False
    is_excluded: bool = False
    problems: list[str] = field(default_factory=list)

    def refuse(self, header: Header, error: Exception) -> Header:
        """Report in a header that this worker cannot vote; raising would leave the others waiting.

        All errors in a user's parameters, gradients and optimizer state end here.
        """
        self.problems.append(describe_problem(error))
        return with_error(header, Status.INPUT, culprit=self.rank)

    def refused(self, error: Exception) -> StepInputs:
        """Return inputs of a step in which this worker cannot vote at all."""
        return replace(self, header=self.refuse(self.header, error))
