"""``FeedbackVote`` on deltas, with a step length in the reply."""

from __future__ import annotations

from dataclasses import dataclass

from distlion.votes.feedback import FeedbackVote


@dataclass(frozen=True)
class EstimateVote(FeedbackVote):
    """Vote on deltas by error feedback, as ``FeedbackVote``, and move by the estimates' mean size.

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
        State, abstention and coins are as in ``FeedbackVote``; n is the number of workers. Each
        shard's owner measures its own elements, so a parameter in two shards, or on two ranks of a
        worker, moves by two scales.
    """

    n_reply_scales = 1

    bits: int = 1
