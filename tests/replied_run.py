"""Three voters that train in one process, and what their replies are on another worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import distlion
from distlion.crew import replies
from distlion.crew.replies import BucketReply, Piece, Replica, StepReply
from distlion.kernels.coin import Coins
from distlion.kernels.contract import Coefficients, Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.layout import Slot, fill_buckets
from distlion.step.param import VotingParam
from distlion.votes.aggregation import Aggregation
from distlion.votes.roster import Roster

CPU = torch.device("cpu")
ROSTER = Roster((0, 3, 5), (0, 3, 5), (1, 1, 1), 7)
SEED = 11


class Run:
    """Three voters that train in one process, without a network."""

    def __init__(self, rule: Aggregation, dtype: torch.dtype, *, backwards: bool = False) -> None:
        torch.manual_seed(0)
        sizes = ((40, 25), (64,), (7,), (33, 31), (1,))
        self.params = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
        self.params[3] = nn.Parameter(torch.randn(31, 33).to(dtype).t())
        named = [(f"p{index}", param) for index, param in enumerate(self.params)]
        self.rule, self.is_rounded = rule, dtype is torch.bfloat16
        self.step = 0
        self.optimizer = distlion.DistributedLion(named, lr=0.1, aggregation=rule)  # of one worker
        self.trained: list[VotingParam] = self.optimizer._list_trainable()
        self.layouts = fill_buckets(
            [each.whole_slot for each in self.trained],
            [each.kind for each in self.trained],
            n_shards=ROSTER.n_shards,
            bucket_elements=1200,
            backwards=backwards,
        )
        kept = torch.float32 if dtype is torch.float16 else dtype
        self.momenta = [
            [torch.zeros_like(param, dtype=kept) for param in self.params] for _ in ROSTER.ids
        ]

    def commit(self) -> StepReply:
        """Do one step; return its reply."""
        kernels, step = choose_kernels(CPU), self.step
        now = Coefficients(0.9, 0.95, 1e-2 * 0.9**step, 0.1 + step / 100)
        rounding = Coins(SEED, step, 0).rounding if self.is_rounded else None
        replies = []
        for layout in self.layouts:
            vote = self.rule.start(layout, ROSTER)
            cast, there, own = [], [], []
            for row, voter in enumerate(ROSTER.ids):
                own = list(self._list_segments(layout.members, layout.slots, row, now))
                votes, _ = vote.encode(kernels, own, (), Coins(SEED, step, voter), device=CPU)
                cast.append(votes.view(-1))
                there.append([segment.grad is not None for segment in own])
            present = torch.tensor(there)
            counted = vote.count(kernels, torch.stack(cast), present, 0, Coins(SEED, step, 0))
            n_present = tuple(vote.count_present(present).tolist())
            vote.commit(kernels, own, n_present, counted, rounding)
            for index, segment in zip(layout.members, own, strict=True):
                self.trained[index].write_back(segment.param)
            replies.append(BucketReply(layout.members, n_present, counted))
        self.step += 1
        seed = SEED if self.is_rounded else None
        return StepReply(step, ROSTER, (now,), seed, tuple(replies))

    def _list_segments(
        self, members: Sequence[int], slots: Sequence[Slot], row: int, now: Coefficients
    ) -> Iterator[Segment]:
        for index, slot in zip(members, slots, strict=True):
            generator = torch.Generator().manual_seed(97 * self.step + 7 * index + row)
            param = self.trained[index].local().detach()
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            # Some parameters have no vote in a step, and some have one.
            abstains = (self.step + index) % 4 == 0 and (row or self.step % 3 == 0)
            momentum = self.momenta[row][index].contiguous()
            yield Segment(slot, param, None if abstains else grad, momentum, now)


def copy_piece(run: Run, piece: Piece) -> Tensor:
    flat = run.params[piece.index].detach().contiguous().view(-1)
    return flat[piece.start : piece.stop].clone().view(torch.uint8)


def pass_on(reply: StepReply) -> StepReply:
    """Return what a reply is on another worker."""
    payload = torch.cat([bucket.payload for bucket in reply.buckets])
    return StepReply.read(json.loads(json.dumps(reply.describe())), payload)


def make_replica(run: Run) -> tuple[Replica, list[nn.Parameter]]:
    """Return a replica in small pieces, and its parameters."""
    own = [nn.Parameter(torch.zeros_like(param)) for param in run.params]
    placed = {id(param): copy for param, copy in zip(run.params, own, strict=True)}
    trained = [replace(each, param=placed[id(each.param)]) for each in run.trained]
    before, replies.PIECE_BYTES = replies.PIECE_BYTES, 256
    try:
        return Replica(own, trained), own
    finally:
        replies.PIECE_BYTES = before
