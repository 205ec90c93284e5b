"""Cases of the ops for ``conformance.conform``: a name, and what to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from backends import CPU
from conformance import (
    DTYPES,
    MANY,
    Memory,
    Run,
    draw,
    draw_words,
    make_bucket,
    make_segments,
)
from distlion.kernels import BlockVotes, Coin, Kernels, ReplyFormat, Segment
from distlion.kernels.contract import PARAM_DTYPES

ZERO = Coin(0x0123456789ABCDEF)
TIE = Coin(0xFEDCBA9876543210, inverted=True)
ROUNDING = Coin(0x243F6A8885A308D3)


# Encoding.

Encode = Callable[[Kernels, Sequence[Segment], Tensor], Tensor]


def levels_encoder(norm: str, step: float) -> Encode:
    return lambda k, segments, out: k.encode_levels(
        segments,
        ZERO,
        norm=norm,  # type: ignore[arg-type]
        step=step,
        out=out,
    )


ENCODERS: dict[str, tuple[int, Encode]] = {
    "signs": (1, lambda k, segments, out: k.encode_signs(segments, ZERO, out=out)),
    "signs, coin inverted": (1, lambda k, segments, out: k.encode_signs(segments, TIE, out=out)),
    "ternary": (2, lambda k, segments, out: k.encode_ternary(segments, out=out)),
    "pairs": (2, lambda k, segments, out: k.encode_pairs(segments, ZERO, out=out)),
    "pairs, coin inverted": (2, lambda k, segments, out: k.encode_pairs(segments, TIE, out=out)),
    "directions in float32": (
        32,
        lambda k, segments, out: k.encode_directions(segments, dtype=torch.float32, out=out),
    ),
    "directions in bfloat16": (
        16,
        lambda k, segments, out: k.encode_directions(segments, dtype=torch.bfloat16, out=out),
    ),
    "levels, 4 planes, l1": (4, levels_encoder("l1", 0.5)),
    "levels, 3 planes, linf": (3, levels_encoder("linf", 0.1)),
}


def encoding(
    encoder: str, sizes: Sequence[int], dtypes: tuple[torch.dtype, torch.dtype], *, wild: bool
) -> tuple[str, Run]:
    planes, encode = ENCODERS[encoder]

    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        bucket = make_bucket(sizes, n_shards=2)
        segments = make_segments(bucket, g, m, dtypes=dtypes, wild=wild)
        flags = encode(k, segments, m.packed(bucket.n_blocks, planes))
        return flags, k.check_finite(k.gather(segments))

    return f"{encoder} {tuple(sizes)} {dtypes} wild={wild}", run


# Encoding rests, and the steps that follow.


def draw_estimates(segments: Sequence[Segment], g: Generator, m: Memory) -> list[Tensor]:
    """Draw them; half of them are 0, as directions may be too."""
    estimates = []
    for segment in segments:
        values = draw(g, segment.slot.n_elements, torch.float32)
        values[::2] = 0
        estimates.append(m.place(values))
    return estimates


Kept = Literal["estimates", "residuals", "nothing"]


def resting(
    bits: int,
    sizes: Sequence[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    wild: bool,
    kept: Kept = "estimates",
) -> tuple[str, Run]:
    """Encode rests; with residuals, move these by the vote."""

    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        bucket = make_bucket(sizes, n_shards=2)
        segments = make_segments(bucket, g, m, dtypes=dtypes, wild=wild)
        estimates = None if kept == "nothing" else draw_estimates(segments, g, m)
        scales = m.place(torch.full((len(sizes), bits), torch.nan))
        out, is_residual = m.packed(bucket.n_blocks, bits), kept == "residuals"
        finite = k.encode_rests(
            segments, estimates, ZERO, out=out, scales=scales, are_residuals=is_residual
        )
        if estimates is not None and is_residual:
            k.move_residuals(segments, estimates, out, scales, finite)
        return finite, scales

    return f"rests, {bits} bits {tuple(sizes)} {dtypes} wild={wild} {kept}", run


BOUNDS: dict[str, dict[str, Any]] = {
    "largest": {},
    "spread": {"spread": 1.7},
    "reach": {"reach": 0.3},
    "no reach": {"reach": 0.0},
    "tiny reach": {"reach": 1e-44},
}


def drawing(
    bound: str, sizes: Sequence[int], dtypes: tuple[torch.dtype, torch.dtype], *, wild: bool
) -> tuple[str, Run]:
    """Encode stochastic signs."""
    options = dict(BOUNDS[bound])
    if "reach" in options:
        options["reach"] = [options["reach"] * (1 + index % 3) for index in range(len(sizes))]

    def run(k: Kernels, g: Generator, m: Memory) -> tuple[Tensor, Tensor]:
        bucket = make_bucket(sizes, n_shards=2)
        segments = make_segments(bucket, g, m, dtypes=dtypes, wild=wild)
        scales = m.place(torch.full((len(sizes), 1), torch.nan))
        out = m.packed(bucket.n_blocks, 1)
        return k.encode_lots(segments, TIE, out=out, scales=scales, **options), scales

    return f"lots, {bound} {tuple(sizes)} {dtypes} wild={wild}", run


def stepping(bits: int, sizes: Sequence[int], *, share: float = 1.0) -> tuple[str, Run]:
    """Add one worker's vote, whose bits and scales are any."""

    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        bucket = make_bucket(sizes, n_shards=2)
        estimates = [m.place(draw(g, n, torch.float32, wild=True)) for n in sizes]
        votes = m.place(draw_words(g, bucket.n_blocks, bits))
        scales = m.place(draw(g, len(sizes) * bits, torch.float32, wild=True).view(-1, bits))
        present = (torch.rand(len(sizes), generator=g) < share).tolist()
        k.add_steps(estimates, bucket.slots, present, votes, scales)
        return estimates

    return f"step, {bits} bits {tuple(sizes)} {share}", run


def stepping_all(
    bits: int,
    n_workers: int,
    sizes: Sequence[int],
    *,
    shard: tuple[int, int] = (0, 1),
    share: float = 1.0,
) -> tuple[str, Run]:
    """As ``counting``, the votes of all workers on one shard."""

    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        bucket = make_bucket(sizes, n_shards=shard[1])
        n_blocks = bucket.shard_blocks
        present = torch.rand(n_workers, len(sizes), generator=g) < share
        drawn = draw(g, n_workers * n_blocks * 512, torch.float32, wild=True)
        estimates = m.place(drawn.view(n_workers, n_blocks * 512))
        votes = m.place(draw_words(g, n_workers, n_blocks, bits))
        scales = draw(g, n_workers * len(sizes) * bits, torch.float32, wild=True)
        said = (
            BlockVotes(votes, m.place(present, CPU), bucket, shard[0] * n_blocks),
            m.place(scales.view(n_workers, len(sizes), bits)),
        )
        k.add_steps_of_all(estimates, *said)
        return [estimates]

    return f"steps of {n_workers}, {bits} bits {tuple(sizes)} {shard} {share}", run


def summing(
    bits: int,
    weights: Sequence[int],
    sizes: Sequence[int],
    *,
    shards: tuple[int, int, int] = (0, 1, 1),
    share: float = 1.0,
    has_estimates: bool = True,
    wild: bool = False,
) -> tuple[str, Run]:
    """Count the votes of all workers on shards from the first to before the second, of some."""
    first, last, n_shards = shards

    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        bucket = make_bucket(sizes, n_shards=n_shards)
        n_workers, n_blocks = len(weights), bucket.shard_blocks * (last - first)
        present = torch.rand(n_workers, len(sizes), generator=g) < share
        drawn = draw(g, n_workers * n_blocks * 512, torch.float32, wild=wild)
        drawn[::3] = 0.5  # so that some sums are 0
        estimates = m.place(drawn.view(n_workers, n_blocks * 512))
        votes = m.place(draw_words(g, n_workers, n_blocks, bits))
        scales = draw(g, n_workers * len(sizes) * bits, torch.float32, wild=wild)
        scales[::2] = 0.25
        out, sums = m.packed(n_blocks, 1), torch.full((last - first, len(sizes)), torch.nan)
        found = m.place(sums.double())
        k.count_steps(
            BlockVotes(votes, m.place(present, CPU), bucket, first * bucket.shard_blocks),
            m.place(scales.view(n_workers, len(sizes), bits)),
            TIE,
            weights=weights,
            estimates=estimates if has_estimates else None,
            out=out,
            sums=found,
        )
        return [out, found]

    case = f"{bits} bits {tuple(sizes)} {shards} {share} {has_estimates} {wild}"
    return f"sums of {tuple(weights)}, {case}", run


# Counting.

Count = Callable[[Kernels, BlockVotes, Tensor], None]


def directions_counter(dtype: torch.dtype) -> Count:
    return lambda k, votes, out: k.sum_directions(votes, dtype=dtype, out=out)


def count_levels(k: Kernels, votes: BlockVotes, out: Tensor) -> None:
    k.count_levels(votes, TIE, out=out)


COUNTERS: dict[str, tuple[int, int, Count]] = {
    "signs": (1, 1, lambda k, votes, out: k.count_signs(votes, TIE, out=out)),
    "signs without coin": (1, 2, lambda k, votes, out: k.count_signs(votes, None, out=out)),
    "ternary": (2, 2, lambda k, votes, out: k.count_ternary(votes, out=out)),
    "pairs": (2, 1, lambda k, votes, out: k.count_pairs(votes, TIE, out=out)),
    "pairs without coin": (2, 2, lambda k, votes, out: k.count_pairs(votes, None, out=out)),
    "ones": (1, 0, lambda k, votes, out: k.count_ones(votes, out=out)),
    "directions in float32": (32, 2, directions_counter(torch.float32)),
    "directions in bfloat16": (16, 2, directions_counter(torch.bfloat16)),
    **{f"levels of {planes} planes": (planes, 1, count_levels) for planes in range(1, 9)},
}


def draw_votes(counter: str, n_workers: int, n_blocks: int, *, ties: bool, g: Generator) -> Tensor:
    """Draw votes of every kind, those that no encoder writes too; ties: half against half."""
    planes = COUNTERS[counter][0]
    votes = draw_words(g, n_workers, n_blocks, planes)
    half = n_workers // 2
    if "directions" in counter:
        dtype = torch.float32 if planes == 32 else torch.bfloat16
        values = votes.view(-1).view(dtype)
        drawn = draw(g, values.numel(), dtype, wild=True)
        finite = torch.rand(values.numel(), generator=g) < 0.95
        values.copy_(torch.where(drawn.isfinite() | ~finite, drawn, torch.ones((), dtype=dtype)))
        if ties:
            rows = values.view(n_workers, -1)
            rows[half : 2 * half] = -rows[:half]
    elif ties:
        votes[half : 2 * half] = votes[:half]
        votes[half : 2 * half, :, 0] = ~votes[:half, :, 0]
    return votes


def counting(
    counter: str,
    n_workers: int,
    sizes: Sequence[int],
    *,
    shard: tuple[int, int] = (0, 1),
    ties: bool = False,
    share: float = 1.0,
    weights: Sequence[int] | None = None,
) -> tuple[str, Run]:
    """Count shard `shard[0]` of `shard[1]`; each worker is present for a `share` of parameters."""
    _, planes, count = COUNTERS[counter]

    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket(sizes, n_shards=shard[1])
        n_blocks = bucket.shard_blocks
        present = torch.rand(n_workers, len(sizes), generator=g) < share
        if share < 1:
            present[:, ::4] = False  # nobody
        votes = m.place(draw_votes(counter, n_workers, n_blocks, ties=ties, g=g))
        out = m.packed(n_blocks, planes or sum(weights or [1] * n_workers).bit_length())
        if weights is not None:
            present = present * torch.tensor(weights, dtype=torch.uint8)[:, None]
        # Presence is read on the host, whatever the backend.
        cast = BlockVotes(votes, m.place(present, CPU), bucket, shard[0] * n_blocks)
        count(k, cast, out)

    said = f"{counter}, {n_workers} workers {tuple(sizes)} {shard} ties={ties} {share}"
    return (said if weights is None else f"{said} {weights}"), run


# Committing.

MOVES = ("commit", "commit without gradients", "update_momentum", "step_alone")
REPLIES = (
    (ReplyFormat.SIGN, 1),
    (ReplyFormat.TERNARY, 2),
    (ReplyFormat.COUNT, 1),
    (ReplyFormat.COUNT, 3),
    (ReplyFormat.COUNT, 13),
)


def committing(
    op: str,
    sizes: Sequence[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    reply_format: ReplyFormat,
    planes: int,
    *,
    rounding: Coin | None = None,
    wild: bool = False,
) -> tuple[str, Run]:
    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket(sizes, n_shards=2)
        segments: Sequence[Segment] = make_segments(bucket, g, m, dtypes=dtypes, wild=wild)
        if op == "commit without gradients":
            segments = [segment._replace(grad=None) for segment in segments]
        if len(sizes) > 1:
            segments = k.gather(segments)
        reply = m.place(draw_words(g, bucket.n_blocks, planes))
        most = 2**planes - 1 if reply_format is ReplyFormat.COUNT else 1
        present = torch.randint(1, most + 1, (len(sizes),), generator=g).tolist()
        if len(sizes) > 1:
            present[1::4] = [0] * len(present[1::4])
        if op == "update_momentum":
            k.update_momentum(segments, present)
        elif op == "step_alone":
            k.step_alone(segments, rounding=rounding)
        else:
            k.commit(segments, present, reply, reply_format=reply_format, rounding=rounding)

    name = f"{op} {tuple(sizes)} {dtypes} {reply_format} {planes} {rounding} wild={wild}"
    return name, run


def moving_outwards(sizes: Sequence[int], *, nesterov: bool, wild: bool = False) -> tuple[str, Run]:
    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        params, starts, buffers = (
            [m.place(draw(g, n, torch.float32, wild=wild)) for n in sizes] for _ in range(3)
        )
        k.add_outer_momentum(params, starts, buffers, momentum=0.9, nesterov=nesterov, lr=0.7)
        return [*params, *starts, *buffers]

    return f"outer momentum {tuple(sizes)} nesterov={nesterov} wild={wild}", run


# Checks, and all of them.


def checking() -> Iterator[tuple[str, Run]]:
    """One case for each op that only looks."""
    for dtype in (*PARAM_DTYPES, torch.uint8):
        yield (
            f"digests of ones, {dtype}",
            lambda k, g, m, d=dtype: k.digests([m.place(torch.ones(n, dtype=d)) for n in (999, 5)]),
        )
    for dtype in PARAM_DTYPES:
        yield (
            f"square sums of ones, {dtype}",
            lambda k, g, m, d=dtype: k.square_sums(m.place(torch.ones(4099, dtype=d))),
        )


def all_ops(sizes: Sequence[int] = MANY) -> Iterator[tuple[str, Run]]:
    """One case for each op."""
    dtypes = (torch.bfloat16, torch.float32)
    for encoder in ENCODERS:
        for wild in (False, True):
            yield encoding(encoder, sizes, dtypes, wild=wild)
    for counter in COUNTERS:
        yield counting(counter, 4, sizes, shard=(1, 2), share=0.7)
        yield counting(counter, 4, sizes, shard=(1, 2), share=0.7, weights=(2, 1, 5, 1))
    for bits in (1, 2):
        for wild in (False, True):
            for kept in ("estimates", "residuals", "nothing"):
                yield resting(bits, sizes, dtypes, wild=wild, kept=kept)
        yield stepping(bits, sizes, share=0.7)
        yield stepping_all(bits, 4, sizes, shard=(1, 2), share=0.7)
        for has_estimates in (False, True):
            options = {"share": 0.7, "has_estimates": has_estimates}
            yield summing(bits, (2, 1, 5, 1), sizes, shards=(1, 2, 2), **options)
    for bound in BOUNDS:
        yield drawing(bound, sizes, dtypes, wild=False)
    for op in MOVES:
        for pair in DTYPES:
            yield committing(op, sizes, pair, ReplyFormat.COUNT, 3, rounding=ROUNDING)
    for nesterov in (False, True):
        yield moving_outwards(sizes, nesterov=nesterov)
    yield from checking()
