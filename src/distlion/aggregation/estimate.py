"""``FeedbackVote`` on deltas: its reply says how far."""

from __future__ import annotations

from dataclasses import dataclass

from distlion.aggregation.feedback import FeedbackVote


@dataclass(frozen=True)
class EstimateVote(FeedbackVote):
    """Vote on deltas by what all votes have said of them so far, as ``FeedbackVote``, and how far.

    Equation:
        h_i, q_i and S as for ``FeedbackVote``, of the delta d_i in place of c_i
        x = x - lr * s * S,  s = mean |sum_i h_i| / n over the parameter's elements in the shard
        (EF21, arXiv:2106.05203, with scaled signs both ways)

    Only ``LocalSteps`` takes this rule.

    Args:
        bits: 1 or 2.

    Raises:
        InvalidArgumentError: ``bits`` is out of range.
        UnsupportedTypeError: ``bits`` is not an integer.

    Notes:
        State, abstention and coins are those of ``FeedbackVote``; n is the number of workers. Each
        owner of a shard measures what it counts, so that a parameter that lies in two shards, or on
        several ranks of a worker, moves by two scales.
    """

    bits: int = 1

    @property
    def n_reply_scales(self) -> int:
        return 1
