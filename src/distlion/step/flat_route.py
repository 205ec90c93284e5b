"""A bucket between workers that each vote for whole parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients, Kernels, Segment
from distlion.layout import BucketLayout
from distlion.step.cut_matrices import CutMatrices
from distlion.step.param import VotingParam
from distlion.step.staging import bring_down, bring_up, name_failure
from distlion.votes.aggregation import Aggregation
from distlion.votes.bucket_vote import BucketCount, BucketVote
from distlion.votes.reply import ParameterReply
from distlion.votes.roster import Roster
from distlion.wire.frame import Header
from distlion.wire.node_frames import gather_flags
from distlion.wire.pattern import Ballot, Exchange, Exchanging, PartialReducer, Reply
from distlion.wire.transport import ByteCount, Transport


@dataclass(frozen=True)
class FlatRoute:
    """Carry one bucket: encode, exchange, commit.

    Attributes:
        bucket: The layout of the parameters.
        params: The parameters, in order.
        rule: The rule of their votes.
        pattern: The exchange pattern.
        device: Their device.
        kernels: The arithmetic there.
        link: The link between voters.
        roster: The roster of voters.
        inside: The link to ranks with other shards of the same parameters; None for none.
        matrices: The matrices among the parameters whose shards lie there; None for none.
    """

    bucket: BucketLayout
    params: tuple[VotingParam, ...]
    rule: Aggregation
    pattern: Exchange
    device: torch.device
    kernels: Kernels
    link: Transport
    roster: Roster
    inside: Transport | None = None
    matrices: CutMatrices | None = None

    def __post_init__(self) -> None:
        if self.roster.owners != self.roster.ids:
            raise InvalidArgumentError(
                "a pattern lets every voter count one shard; expected a roster whose owners are "
                f"its ids, not {self.roster}"
            )

    @property
    def own(self) -> tuple[VotingParam, ...]:
        return self.params

    @property
    def parts(self) -> tuple[FlatRoute, ...]:
        return (self,)

    @cached_property
    def vote(self) -> BucketVote:
        """The vote on the bucket, with its state between steps."""
        return self.rule.start(self.bucket, self.roster)

    def plan(self) -> ByteCount:
        return self.pattern.plan(self.vote.shape, self.link.rank)

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[Sequence[Tensor | None], float, Header]:
        return grads, grad_scale, header

    @property
    def _is_on_host(self) -> bool:
        """True if parameters are in host memory, from which the network reads."""
        return self.device == self.link.wire_device

    def encode(self, segments: Sequence[Segment], coins: Coins, *more: Tensor) -> Sequence[Tensor]:
        if self._is_on_host:
            return *self._encode(segments, coins), *more
        with name_failure(self.device, f"votes on bucket {self.bucket.index} were encoded"):
            return bring_down([*self._encode(segments, coins), *more])

    def _encode(self, segments: Sequence[Segment], coins: Coins) -> tuple[Tensor, Tensor]:
        kept = [param.worker_state for param in self.params] if segments and self._keeps else ()
        return self.vote.encode(self.kernels, segments, kept, coins, device=self.device)

    @cached_property
    def _keeps(self) -> bool:
        """True if the rule keeps state between steps."""
        return bool(self.rule.worker_state)

    def agree(
        self, finite: Sequence[bool], header: Header, *, overflow: bool
    ) -> tuple[Sequence[bool], Header]:
        if self.inside is None:
            return finite, header
        flags = torch.tensor(finite, dtype=torch.bool, device="cpu") & (not overflow)
        header, gathered = gather_flags(self.inside, flags, header)
        return gathered.all(0).tolist(), header

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        sent = replace(header, sender=self.link.rank)
        ballot = Ballot(sent, votes, torch.tensor(present, dtype=torch.bool, device="cpu"))
        counted = BucketCount(self.vote, self.link.kernels, coins)
        return self.pattern.exchange(self.link, self.vote.shape, ballot, counted)

    def commit(
        self,
        segments: Sequence[Segment],
        reply: Reply,
        coefficients: Sequence[Coefficients],
        rounding: Coin | None,
    ) -> None:
        payload, present = self.place_reply(reply.payload), reply.present.tolist()
        self.vote.commit(self.kernels, segments, present, payload, rounding)
        for index, param in enumerate(self.params):
            if segments[index].param is not param.param:
                param.write_back(segments[index].param)

    def tell_counters(self, link: Transport, header: Header) -> Exchanging[Reply] | None:
        if not (self._keeps and self.params):
            return None
        vote, bucket = self.vote, self.bucket
        ballot = Ballot(
            replace(header, bucket=bucket.index, sender=link.rank),
            vote.tell([param.worker_state for param in self.params]),
            torch.ones(len(bucket.slots), dtype=torch.bool, device="cpu"),
        )
        return self.pattern.exchange(link, vote.told_shape, ballot, _Hearing(vote))

    def place_reply(self, payload: Tensor) -> Tensor:
        """Return a reply's bytes on the parameters' device."""
        return payload if self._is_on_host else bring_up(payload, self.device)

    def list_replies(self, reply: Reply) -> list[ParameterReply]:
        positions = [param.position for param in self.params]
        return self.vote.list_replies(reply.payload, reply.present.tolist(), positions)

    def list_voted(self, reply: Reply) -> list[int]:
        present = zip(self.params, reply.present.tolist(), strict=True)
        return [param.position for param, n_votes in present if n_votes]


@dataclass(frozen=True)
class _Hearing:
    """A reducer that passes worker state to a counter, and replies zeros."""

    vote: BucketVote

    @property
    def parts(self) -> PartialReducer | None:
        return None

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        self.vote.hear(votes)
        shape = self.vote.told_shape
        n_shards = votes.shape[1] // shape.vote_bytes
        return torch.zeros(n_shards * shape.reply_bytes, dtype=torch.uint8, device="cpu")

    def count_present(self, present: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        return present.sum(0)
