"""One or two bits up, one bit down: votes on the part of a direction not transmitted yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.coin import Coins
from distlion.kernels.contract import ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes, count_estimates
from distlion.kernels.reference import Kernels
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout
from distlion.numpy_numbers import keep_as_python
from distlion.votes.aggregation import Aggregation
from distlion.votes.bucket_vote import BucketVote, WorkerState
from distlion.votes.roster import Roster

MOST_BITS = 2
_ESTIMATE = "estimate"


@dataclass(frozen=True)
class FeedbackVote(Aggregation):
    """Move every element by the sign of the summed estimates of directions, by error feedback.

    Equation:
        d_i = c_i - h_i,  c_i = beta1 * m_i + (1 - beta1) * g_i
        q_i = sign(d_i) * a_i;  h_i <- h_i + q_i;  S = sign(sum_i h_i)
        one bit:  a_i = mean |d_i| over the parameter
        two bits: the second one says whether |d_i| is at least that mean; a_i is the mean |d_i| of
                  the elements of which it says the same
        (EF21, arXiv:2106.05203, with scaled signs for its compressor, on Lion's directions)

    The estimate h_i sums what worker i's votes have transmitted of its direction. It tracks the
    direction step by step, so the sum of all estimates tracks global Lion. This also holds where
    workers see different data, on which a majority vote stops learning.

    Args:
        bits: 1 or 2. Two also matched a majority vote on evenly shared data.

    Raises:
        InvalidArgumentError: ``bits`` is out of range.
        UnsupportedTypeError: ``bits`` is not an integer.

    Notes:
        A vote carries ``bits`` float32 scales for each parameter; with ``nodes``, and of sharded
        parameters, for each piece. Every worker keeps its estimate beside its momentum, in float32
        and in ``state[param]["estimate"]``. A rank that counts keeps all workers' estimates of its
        elements: with ``AllReduce`` as many elements again, with ``AllGather`` and on the server of
        ``ParameterServer`` N times as many. That copy is exchanged anew, in 32 bits, when a state
        is loaded. The estimate of a worker that abstains still counts. Where d_i is exactly 0 its
        worker's coin decides, where the sum is exactly 0 a common coin.
    """

    vote_format = VoteFormat.STEP
    reply_format = ReplyFormat.SIGN

    worker_state: ClassVar[tuple[str, ...]] = (_ESTIMATE,)

    bits: int = 2

    def __post_init__(self) -> None:
        keep_as_python(self, "bits")
        given = f"{type(self).__name__}(bits={self.bits!r})"
        if not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise UnsupportedTypeError(f"{given}: expected an integer")
        if not 1 <= self.bits <= MOST_BITS:
            raise InvalidArgumentError(f"{given}: expected 1 or {MOST_BITS}")

    @property
    def vote_planes(self) -> int:
        return self.bits

    def reply_planes(self, n_votes: int) -> int:
        return 1

    @property
    def n_scales(self) -> int:
        return self.bits

    def start(self, bucket: BucketLayout, roster: Roster) -> BucketVote:
        return FeedbackBucket(self, bucket, roster)

    def encode(
        self, kernels: Kernels, segments: Sequence[Segment], coins: Coins, *, out: Tensor
    ) -> Tensor:
        """Write the bits of a first vote, with a worker's state still 0, without its scales."""
        scales = torch.empty(len(segments), self.n_scales, dtype=torch.float32, device=out.device)
        return kernels.encode_rests(segments, None, coins.zero, out=out, scales=scales)

    def count(self, kernels: Kernels, votes: BlockVotes, coins: Coins, *, out: Tensor) -> None:
        """Write the reply to estimates after a vote.

        ``votes`` are 32 planes of float32 values: the estimates of all workers, or their sum in
        rank order as a single row.
        """
        count_estimates(kernels, votes, coins.tie, out=out)


class FeedbackBucket(BucketVote):
    """The vote on one bucket, with all workers' estimates where this rank counts.

    A worker's own estimates are in the optimizer's state, which it passes in with every vote.
    """

    def __init__(self, rule: FeedbackVote, bucket: BucketLayout, roster: Roster) -> None:
        super().__init__(rule, bucket, roster)
        # (workers, elements counted here) float32; None before the first vote is counted.
        self._everybody: Tensor | None = None

    def _encode(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        kept: Sequence[WorkerState],
        coins: Coins,
        *,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Encode the directions minus their estimates: each shard's bits, and all scales."""
        estimates = [state[_ESTIMATE] for state in kept]
        votes, slots = self._make_votes(device), self.bucket.slots
        scales = torch.zeros(len(slots), self.rule.n_scales, dtype=torch.float32, device=device)
        finite = kernels.encode_rests(
            segments, estimates, coins.zero, out=votes, scales=scales[: len(segments)]
        )
        present = [segment.grad is not None for segment in segments]
        self._move_own = partial(kernels.add_steps, estimates, slots, present, votes, scales)
        return self._join_votes(votes, scales), finite

    def count(
        self, kernels: Kernels, votes: Tensor, present: Tensor, first_shard: int, coins: Coins
    ) -> Tensor:
        packed, scales = self._split_votes(votes)
        if self._everybody is None:
            n_elements = packed.shape[1] * BLOCK_WORDS * WORD_ELEMENTS
            self._everybody = torch.zeros(
                len(votes), n_elements, dtype=torch.float32, device=votes.device
            )
        first_block = first_shard * self.bucket.shard_blocks
        said, estimates = BlockVotes(packed, present, self.bucket, first_block), self._everybody
        self._move_counted = partial(kernels.add_steps_of_all, estimates, said, scales)
        return self._count_steps(
            kernels,
            said,
            scales,
            coins,
            estimates=estimates,
            n_votes=[self.roster.n_votes] * len(self.bucket.slots),
            shards=range(first_shard, first_shard + self._count_shards(votes)),
        )

    def import_states(self, told: Tensor) -> None:
        self._everybody = told.contiguous().view(torch.float32).clone()
