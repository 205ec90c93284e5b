"""Calls of the C++ core whose arguments fit, but for what a test changes."""

from __future__ import annotations

import torch
from torch import Tensor

from distlion.kernels import BlockVotes, Coefficients, Coin, ReplyFormat, Segment
from distlion.kernels.cpu import CpuKernels
from distlion.layout import BucketLayout, Slot

KERNELS = CpuKernels()
COIN = Coin(1)
HYPER = Coefficients(0.9, 0.99, 0.1, 0.0)
N = 100
SLOTS = (Slot("first", N, 0, 0), Slot("second", N, 2, 2))
BUCKET = BucketLayout(0, (0, 1), SLOTS, 1)


def make_segments(**changes: object) -> list[Segment]:
    """Make two segments; `changes` are those of the second."""
    segments = [
        Segment(slot, torch.zeros(N), torch.ones(N), torch.zeros(N), HYPER) for slot in SLOTS
    ]
    return [segments[0], segments[1]._replace(**changes)]


def words(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def encode(out: Tensor | None = None, **changes: object) -> None:
    out = words(1, 1, 8) if out is None else out
    KERNELS.encode_signs(make_segments(**changes), COIN, out=out)


def commit(
    present: tuple[int, ...] = (1, 1),
    reply: Tensor | None = None,
    reply_format: ReplyFormat = ReplyFormat.SIGN,
    **changes: object,
) -> None:
    KERNELS.commit(
        make_segments(**changes),
        present,
        words(1, 1, 8) if reply is None else reply,
        reply_format=reply_format,
        rounding=None,
    )


def count(
    votes: Tensor | None = None,
    out: Tensor | None = None,
    present: Tensor | None = None,
    op: str = "count_signs",
    bucket: BucketLayout = BUCKET,
) -> None:
    votes = words(3, 1, 1, 8) if votes is None else votes
    out = words(1, 1, 8) if out is None else out
    if present is None:
        present = torch.ones(votes.shape[0], 2, dtype=torch.bool)
    coin = (COIN,) if op in ("count_signs", "count_pairs", "count_levels") else ()
    getattr(KERNELS, op)(BlockVotes(votes, present, bucket, 0), *coin, out=out)


def apart(n: int) -> Tensor:
    """Every other element."""
    return torch.zeros(2 * n)[::2]
