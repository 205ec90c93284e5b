"""One bucket of a virtual step: the workers' votes come in one by one and are counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.layout import BucketLayout
from distlion.step.param import VotingParam
from distlion.votes.bucket_vote import WorkerState
from distlion.votes.reply import ParameterReply
from distlion.votes.roster import Roster


class VirtualRoute:
    """The votes on one bucket, step by step.

    Args:
        bucket: The bucket.
        params: All trainable parameters; their state has shape (workers, *param.shape).
        roster: The workers, by place.

    Attributes:
        params: The bucket's parameters, in order.
        rule, kernels: The rule of their votes, and its arithmetic.
        present: (workers, n_params) bool on the CPU: the votes cast in this step.
    """

    def __init__(self, bucket: BucketLayout, params: Sequence[VotingParam], roster: Roster) -> None:
        self.bucket = bucket
        self.params = tuple(
            params[position].at(bucket.slots[index])
            for index, position in enumerate(bucket.members)
        )
        self.rule, _, self._device, _ = self.params[0].kind
        self.kernels = choose_kernels(self._device)
        workers = roster.n_voters
        self.present = torch.zeros(workers, len(self.params), dtype=torch.bool, device="cpu")
        self._workers = [self.rule.start(bucket, roster) for _ in range(workers)]
        # Separate from the workers' votes, which note their own state before all are counted.
        self._counter = self.rule.start(bucket, roster)
        n_bytes = bucket.n_shards * self._counter.shape.vote_bytes
        self._votes = torch.zeros(workers, n_bytes, dtype=torch.uint8, device=self._device)
        self._reply, self._n_votes = self._votes[:0], [0] * len(self.params)
        # A counter learns workers' state from the votes that it has counted.
        self._knows = not self.rule.worker_state

    def begin(self, *, committed: bool) -> None:
        """Begin a step; ``committed`` tells whether the last one was committed."""
        if committed:
            self._counter.note()
        elif self.rule.worker_state:
            self._knows = False
        self._votes.zero_()
        self.present.zero_()

    def encode(self, worker: int, segments: Sequence[Segment], coins: Coins) -> Tensor:
        """Encode a worker's vote; return whether segments are finite, (n_params,) bool."""
        self._hear()
        votes, finite = self._workers[worker].encode(
            self.kernels, segments, self._recall(worker), coins, device=self._device
        )
        self._votes[worker] = votes.view(-1)
        return finite

    def note(self, worker: int, present: Sequence[bool]) -> None:
        """Note the parameters that a worker votes for, and its vote's effect on its state."""
        self._workers[worker].note()
        self.present[worker] = torch.tensor(present, dtype=torch.bool, device="cpu")

    def leave_out(self, worker: int) -> None:
        """Let a worker's vote not count."""
        self._votes[worker].zero_()

    def count(self, coins: Coins) -> None:
        """Count the votes of all workers."""
        self._hear()
        self._reply = self._counter.count(self.kernels, self._votes, self.present, 0, coins)
        self._n_votes = self._counter.count_present(self.present).tolist()

    def list_voted(self) -> list[int]:
        """List the positions of the parameters that some worker voted on."""
        voted = zip(self.params, self._n_votes, strict=True)
        return [param.position for param, n_votes in voted if n_votes]

    def apply(self, segments: Sequence[Segment], rounding: Coin | None) -> None:
        """Apply the reply to the parameters; momenta moved when workers were collected."""
        self._counter.apply(self.kernels, segments, self._n_votes, self._reply, rounding)
        for index, param in enumerate(self.params):
            param.write_back(segments[index].param)

    def _hear(self) -> None:
        """Load all workers' state into the counter, unless it already has it."""
        if not self._knows:
            told = [worker.tell(self._recall(n)) for n, worker in enumerate(self._workers)]
            everything = torch.stack([each.view(-1) for each in told])
            self._counter.hear(everything.to(self._device))
        self._knows = True

    def _recall(self, worker: int) -> list[WorkerState]:
        if not self.rule.worker_state:
            return []
        states = [param.worker_state for param in self.params]
        return [{key: kept[worker] for key, kept in state.items()} for state in states]

    def list_replies(self) -> list[ParameterReply]:
        """List the replies, one for each parameter."""
        positions = [param.position for param in self.params]
        return self._counter.list_replies(self._reply, self._n_votes, positions)
