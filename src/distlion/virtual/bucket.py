"""A bucket of all workers of one process: N encodes, one count, one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from distlion.failures import Status
from distlion.kernels.coin import Coins
from distlion.kernels.contract import Coefficients
from distlion.kernels.dispatch import choose_kernels
from distlion.layout import BucketLayout
from distlion.step.bucket import NO_REPLY, Bucket
from distlion.step.param import VotingParam, make_segments
from distlion.votes.bucket_vote import BucketCount
from distlion.votes.roster import Roster
from distlion.wire.frame import Header
from distlion.wire.pattern import Exchange, Exchanging, Reply
from distlion.wire.transport import Transport
from distlion.wire.verdict import Verdict


class _Rows(Mapping[Tensor, Mapping[str, Any]]):
    """One worker's part of a state whose tensors have a first dim for the workers."""

    def __init__(self, state: Mapping[Tensor, Mapping[str, Any]], worker: int) -> None:
        self._state, self._worker = state, worker

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        # What is not of this form is returned whole, and then refused by its own shape.
        return {
            key: rows[self._worker]
            if isinstance(rows, Tensor) and rows.dim() == param.dim() + 1
            else rows
            for key, rows in self._state[param].items()
        }

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def take_rows(params: Sequence[VotingParam], worker: int) -> list[VotingParam]:
    """Return one worker's records of parameters whose state has shape (workers, *param.shape)."""
    return [
        replace(
            param,
            state=_Rows(param.state, worker),
            kept=param.kept._replace(shape=param.make.shape),
        )
        for param in params
    ]


@dataclass(frozen=True)
class _NoWire:
    """The link of virtual workers: where votes are counted, and for whom bytes are planned."""

    wire_device: torch.device
    rank: int


class Side(Bucket):
    """One worker's side of a bucket, whose other voters are in the same process.

    Attributes:
        votes: (n_bytes,) uint8: its row among the votes to be counted.
        present: (n_params,) bool: its row among the votes that are cast.
    """

    votes: Tensor
    present: Tensor

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        """Keep the vote; the reply is the whole bucket's."""
        self.votes.copy_(votes.view(-1))
        self._cast = present
        yield from ()
        return NO_REPLY

    def hand_in(self) -> None:
        """Let the vote count, and move this worker's momenta and state."""
        self.present.copy_(torch.tensor(self._cast, dtype=torch.bool, device="cpu"))
        self.vote.note()
        self.kernels.update_momentum(self.segments, [1] * len(self.segments))
        self.clear()

    def load_absent(self, coefficients: Sequence[Coefficients]) -> None:
        """Load segments without gradients."""
        _load_absent(self, coefficients)


class VirtualBucket(Bucket):
    """A bucket whose voters are all in this process.

    Its own vote counts and is committed. The workers' momenta move apart from it, when they hand in
    their votes, so that a gradient is released before the next worker's comes.

    Args:
        layout: The layout of the parameters.
        params: All trainable parameters; their state has shape (workers, *param.shape).
        roster: The workers, by place.
        pattern: The pattern whose bytes are planned.

    Attributes:
        sides: Each worker's side of the bucket.
        votes: (workers, n_bytes) uint8: the votes.
        present: (workers, n_params) bool on the CPU: the votes that are cast in this step.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[VotingParam],
        roster: Roster,
        pattern: Exchange,
    ) -> None:
        members = [
            params[position].at(slot)
            for position, slot in zip(layout.members, layout.slots, strict=True)
        ]
        rule, _, device = members[0].kind
        link = cast(Transport, _NoWire(device, roster.n_voters - 1))
        # A vote for each worker, and one that counts: workers note their state before that.
        whole, *sides = (
            (layout, take_rows(members, worker), rule.start(layout, roster), pattern, device)
            for worker in (0, *range(roster.n_voters))
        )
        super().__init__(*whole, choose_kernels(device), link)
        self.pattern.check_carries(self.vote.shape, rule)
        n_bytes = layout.n_shards * self.vote.shape.vote_bytes
        self.votes = torch.zeros(len(sides), n_bytes, dtype=torch.uint8, device=device)
        self.present = torch.zeros(len(sides), len(members), dtype=torch.bool, device="cpu")
        self.sides = [Side(*each, self.kernels, link) for each in sides]
        for worker, side in enumerate(self.sides):
            side.votes, side.present = self.votes[worker], self.present[worker]
        if rule.worker_state:
            told = [
                side.vote.export_state([param.worker_state for param in side.params]).view(-1)
                for side in self.sides
            ]
            self.vote.import_states(torch.stack(told).to(device))

    def begin(self) -> None:
        """Begin a step."""
        for bucket in (self, *self.sides):
            bucket.clear()
        self.votes.zero_()
        self.present.zero_()

    def count(self, coins: Coins, coefficients: Sequence[Coefficients]) -> None:
        """Count the votes that were handed in."""
        counted = BucketCount(self.vote, self.kernels, coins)
        self.reply = Reply(
            Verdict(Status.OK),
            counted.count_present(self.present),
            counted.reduce(self.votes, self.present, 0),
        )
        _load_absent(self, coefficients)


def _load_absent(bucket: Bucket, coefficients: Sequence[Coefficients]) -> None:
    bucket.segments = make_segments(bucket.own, [None] * len(bucket.own), coefficients, 1.0)
