"""Plain torch for every op of ``contract.py``, short enough to check by eye; the reference.

The method of the same name in ``contract.Kernels`` documents each function.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import (
    CHECKSUM_BYTES,
    FLOAT32_MAX,
    Coefficients,
    FrameFormat,
    ReplyFormat,
    Segment,
)
from distlion.kernels.counting import BlockVotes
from distlion.kernels.feedback import add_steps as add_steps
from distlion.kernels.feedback import add_steps_of_all as add_steps_of_all
from distlion.kernels.feedback import (
    count_steps_by,
    encode_lots_by,
    encode_rests_by,
    move_residuals_by,
)
from distlion.kernels.words import (
    CHUNK_ELEMENTS,
    Run,
    coin_bits,
    cut_blocks,
    cut_runs,
    digest_bits,
    draw_words,
    interleave,
    mean_by_halving,
    pack,
    split_planes,
    sum_by_halving,
    unpack,
)
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Slot


def gather(segments: Sequence[Segment]) -> Sequence[Segment]:
    return tuple(segments)


# Directions and momenta.


def _round32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32).item()


def _widened_grad(grad: Tensor, coefficients: Coefficients) -> Tensor:
    g = grad.view(-1).float()
    return g if coefficients.grad_scale == 1.0 else g.mul(_round32(coefficients.grad_scale))


def _blend(beta: float, exp_avg: Tensor, g: Tensor) -> Tensor:
    """Blend as fl(fl(beta * m) + fl((1 - beta) * g)): c for beta1, the new momentum for beta2."""
    return exp_avg.view(-1).float().mul(_round32(beta)).add(g.mul(_round32(1.0 - beta)))


def _direction(segment: Segment, grad: Tensor) -> Tensor:
    g = _widened_grad(grad, segment.coefficients)
    return _blend(segment.coefficients.beta1, segment.exp_avg, g)


def _mask(c: Tensor, segment: Segment, grad: Tensor) -> Tensor:
    """Mask a cautious parameter's direction: c where it has the sign of g, else +0."""
    if not segment.coefficients.cautious:
        return c
    g = _widened_grad(grad, segment.coefficients)
    return torch.where(((c > 0) & (g > 0)) | ((c < 0) & (g < 0)), c, 0.0)


def _new_momentum(segment: Segment, grad: Tensor) -> Tensor:
    g = _widened_grad(grad, segment.coefficients)
    return _blend(segment.coefficients.beta2, segment.exp_avg, g).to(segment.exp_avg.dtype)


def _checked_direction(
    segment: Segment, grad: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute the direction, rounded to ``dtype``, and () bool: it and the new momentum are finite.

    A gradient that is not finite shows in the direction, since 1 - beta1 > 0; the mask comes last,
    as it would hide it.
    """
    c = _direction(segment, grad)
    finite = c.to(dtype).isfinite().all() & _new_momentum(segment, grad).isfinite().all()
    return _mask(c, segment, grad).to(dtype), finite


def check_finite(segments: Sequence[Segment]) -> Tensor:
    device = segments[0].param.device if segments else None
    finite = torch.ones(len(segments), dtype=torch.bool, device=device)
    for index, segment in enumerate(segments):
        if segment.grad is not None:
            _, finite[index] = _checked_direction(segment, segment.grad)
    return finite


# Encoding. Non-finite values are masked, as a test for them would wait for the device.


def _encode(
    segments: Sequence[Segment],
    out: Tensor,
    planes_of: Callable[[Tensor, Segment], Sequence[Tensor]],
) -> Tensor:
    """Write the words ``planes_of(c, segment)`` of every finite direction; all else is zeros."""
    planes = out.new_zeros(out.shape[1], out.shape[0] * BLOCK_WORDS)
    finite = torch.ones(len(segments), dtype=torch.bool, device=out.device)
    for index, segment in enumerate(segments):
        if segment.grad is None:
            continue
        slot = segment.slot
        c, finite[index] = _checked_direction(segment, segment.grad)
        for plane, words in enumerate(planes_of(c, segment)):
            kept = words.masked_fill(~finite[index], 0)
            planes[plane, slot.bucket_word : slot.bucket_word + slot.n_words] = kept
    interleave(planes, out)
    return finite


def _sign_words(c: Tensor, slot: Slot, zero: Coin) -> Tensor:
    """Return a bit for each element: 1 where c > 0, the coin's where c = 0."""
    return pack(c > 0) | (pack(c == 0) & coin_bits(zero, slot, device=c.device))


def encode_signs(segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
    return _encode(segments, out, lambda c, segment: [_sign_words(c, segment.slot, zero)])


def encode_ternary(segments: Sequence[Segment], *, out: Tensor) -> Tensor:
    return _encode(segments, out, lambda c, _: [pack(c > 0), pack(c != 0)])


def encode_pairs(segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
    def planes_of(c: Tensor, segment: Segment) -> list[Tensor]:
        assert segment.grad is not None
        g = _widened_grad(segment.grad, segment.coefficients)
        return [_sign_words(c, segment.slot, zero), _sign_words(g, segment.slot, zero.second)]

    return _encode(segments, out, planes_of)


def encode_levels(
    segments: Sequence[Segment],
    zero: Coin,
    *,
    norm: Literal["l1", "linf"],
    step: float,
    out: Tensor,
) -> Tensor:
    n_magnitude_bits = out.shape[1] - 1

    def planes_of(c: Tensor, segment: Segment) -> list[Tensor]:
        levels = _levels(c, norm, step, highest=2**n_magnitude_bits - 1)
        return [_sign_words(c, segment.slot, zero)] + [
            pack((levels >> bit) & 1) for bit in range(n_magnitude_bits)
        ]

    return _encode(segments, out, planes_of)


def _levels(c: Tensor, norm: Literal["l1", "linf"], step: float, highest: int) -> Tensor:
    """Quantize: a = min(floor(fl(|c| * r)), highest), (n,) uint8."""
    blocks = cut_blocks(c.abs())
    scale = mean_by_halving(blocks, c.numel()) if norm == "l1" else blocks.amax(1)
    inverse = (1.0 / (scale.double() * step)).clamp(max=FLOAT32_MAX).float()
    inverse = inverse.masked_fill(scale == 0, 0.0)
    levels = (blocks * inverse.unsqueeze(1)).floor().clamp(max=float(highest))
    return levels.to(torch.uint8).view(-1)[: c.numel()]


def encode_directions(segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor) -> Tensor:
    values = out.zero_().view(-1).view(dtype)
    finite = torch.ones(len(segments), dtype=torch.bool, device=out.device)
    for index, segment in enumerate(segments):
        if segment.grad is None:
            continue
        c, finite[index] = _checked_direction(segment, segment.grad, dtype)
        start = segment.slot.bucket_word * WORD_ELEMENTS
        values[start : start + c.numel()] = c.masked_fill(~finite[index], 0)
    return finite


def encode_rests(
    segments: Sequence[Segment],
    estimates: Sequence[Tensor] | None,
    zero: Coin,
    *,
    out: Tensor,
    scales: Tensor,
    are_residuals: bool = False,
) -> Tensor:
    read = (segments, estimates, zero)
    return encode_rests_by(
        encode_directions, *read, out=out, scales=scales, are_residuals=are_residuals
    )


def encode_lots(
    segments: Sequence[Segment],
    lot: Coin,
    *,
    out: Tensor,
    scales: Tensor,
    reach: Sequence[float] = (),
    spread: float | None = None,
) -> Tensor:
    return encode_lots_by(
        encode_directions, segments, lot, out=out, scales=scales, reach=reach, spread=spread
    )


def move_residuals(
    segments: Sequence[Segment],
    residuals: Sequence[Tensor],
    votes: Tensor,
    scales: Tensor,
    finite: Tensor,
) -> None:
    move_residuals_by(encode_directions, segments, residuals, votes, scales, finite)


# Counting, at the owner.


def _count(votes: BlockVotes, out: Tensor, reply_of: Callable[[Run], Sequence[Tensor]]) -> None:
    """Write the planes ``reply_of(run)``, (n_elements,) of 0 and 1 each; all else is zeros."""
    planes = out.new_zeros(out.shape[1], out.shape[0] * BLOCK_WORDS)
    _, present, bucket, first_block = votes
    for run in cut_runs(bucket, present, first_block, out.shape[0], device=out.device):
        for plane, bits in enumerate(reply_of(run)):
            planes[plane, run.words] = pack(bits)
    interleave(planes, out)


def _sign_or_coin(total: Tensor, tie: Coin, run: Run) -> Tensor:
    """Turn (n,) sums into sign bits, the coin's on a tie."""
    flips = coin_bits(tie, run, device=total.device)
    return torch.where(total == 0, unpack(flips, run.n_elements), (total > 0).to(torch.uint8))


def count_signs(votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
    planes = split_planes(votes.packed)

    def reply_of(run: Run) -> list[Tensor]:
        bits = run.bits(planes, 0)
        total = 2 * bits.sum(0, dtype=torch.int64) - bits.shape[0]
        return [total > 0, total != 0] if tie is None else [_sign_or_coin(total, tie, run)]

    _count(votes, out, reply_of)


def count_ternary(votes: BlockVotes, *, out: Tensor) -> None:
    planes = split_planes(votes.packed)

    def reply_of(run: Run) -> list[Tensor]:
        sign, non_zero = run.bits(planes, 0).to(torch.int64), run.bits(planes, 1)
        total = ((2 * sign - 1) * non_zero).sum(0)
        return [total > 0, total != 0]

    _count(votes, out, reply_of)


def count_pairs(votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
    planes = split_planes(votes.packed)

    def reply_of(run: Run) -> list[Tensor]:
        directions, gradients = (
            2 * run.bits(planes, plane).sum(0, dtype=torch.int64) - len(run.voters)
            for plane in range(2)
        )
        agreed = torch.where(directions * gradients > 0, directions, 0)
        return [agreed > 0, agreed != 0] if tie is None else [_sign_or_coin(agreed, tie, run)]

    _count(votes, out, reply_of)


def count_ones(votes: BlockVotes, *, out: Tensor) -> None:
    planes = split_planes(votes.packed)

    def reply_of(run: Run) -> list[Tensor]:
        ones = run.bits(planes, 0).sum(0, dtype=torch.int64)
        return [(ones >> bit) & 1 for bit in range(out.shape[1])]

    _count(votes, out, reply_of)


def count_levels(votes: BlockVotes, tie: Coin, *, out: Tensor) -> None:
    planes = split_planes(votes.packed)

    def reply_of(run: Run) -> list[Tensor]:
        level = torch.ones_like(run.bits(planes, 0), dtype=torch.int64)
        for plane in range(1, votes.packed.shape[2]):
            level += run.bits(planes, plane).to(torch.int64) << plane
        total = ((2 * run.bits(planes, 0).to(torch.int64) - 1) * level).sum(0)
        return [_sign_or_coin(total, tie, run)]

    _count(votes, out, reply_of)


def sum_directions(votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None:
    values = votes.packed.flatten(1).view(dtype)

    def reply_of(run: Run) -> list[Tensor]:
        start = run.words.start * WORD_ELEMENTS
        directions = values[run.voters, start : start + run.n_elements]
        total = torch.zeros_like(directions[0], dtype=torch.float32)
        for direction in directions:
            total = total + direction.float()
        return [total > 0, total != 0]

    _count(votes, out, reply_of)


def count_steps(
    votes: BlockVotes,
    scales: Tensor,
    tie: Coin,
    *,
    weights: Sequence[int],
    estimates: Tensor | None,
    out: Tensor,
    sums: Tensor,
) -> None:
    given = (sum_directions, votes, scales, tie)
    count_steps_by(*given, weights=weights, estimates=estimates, out=out, sums=sums)


# Committing.


def _replied(planes: Tensor, slot: Slot, present: int, reply_format: ReplyFormat) -> Tensor:
    """Read the integers S of one parameter, (n,) float32, from (planes, words)."""
    words = planes[:, slot.bucket_word : slot.bucket_word + slot.n_words]
    bits = unpack(words, slot.n_elements).to(torch.int32)
    if reply_format is ReplyFormat.COUNT:
        weights = 2 ** torch.arange(bits.shape[0], dtype=torch.int32, device=bits.device)
        return (2 * (bits * weights.unsqueeze(1)).sum(0) - present).float()
    sign = 2 * bits[0] - 1
    return (sign if reply_format is ReplyFormat.SIGN else sign * bits[1]).float()


def _move(segment: Segment, s: Tensor, divisor: int, rounding: Coin | None) -> None:
    """Write fl(fl(d * x) - fl(a * S)), rounded to the parameter's dtype; a = lr / divisor."""
    hyper = segment.coefficients
    decay = _round32(1.0 - hyper.lr * hyper.weight_decay)
    param = segment.param.view(-1)
    x = param.float().mul(decay).sub(s.mul(_round32(hyper.lr / divisor)))
    if rounding is not None and param.dtype == torch.bfloat16:
        x = _round_stochastically(x, rounding, segment.slot)
    param.copy_(x)


def _round_stochastically(x: Tensor, rounding: Coin, slot: Slot) -> Tensor:
    """Round to bfloat16's values: add 16 random bits below its mantissa, then cut them off."""
    first_word, skipped = divmod(slot.first_word * WORD_ELEMENTS + slot.first_bit, 4)
    words = draw_words(rounding, first_word, -(-(skipped + x.numel()) // 4), device=x.device)
    noise = words.view(torch.int16).to(torch.int32)[skipped : skipped + x.numel()] & 0xFFFF
    rounded = ((x.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def update_momentum(segments: Sequence[Segment], present: Sequence[int]) -> None:
    for index, segment in enumerate(segments):
        if present[index] and segment.grad is not None:
            segment.exp_avg.view(-1).copy_(_new_momentum(segment, segment.grad))


def commit(
    segments: Sequence[Segment],
    present: Sequence[int],
    reply: Tensor,
    *,
    reply_format: ReplyFormat,
    rounding: Coin | None,
) -> None:
    planes = split_planes(reply)
    for index, segment in enumerate(segments):
        if n := present[index]:
            s = _replied(planes, segment.slot, n, reply_format)
            _move(segment, s, n if reply_format is ReplyFormat.COUNT else 1, rounding)
    update_momentum(segments, present)


def step_alone(segments: Sequence[Segment], *, rounding: Coin | None) -> None:
    for segment in segments:
        if segment.grad is not None:
            c = _mask(_direction(segment, segment.grad), segment, segment.grad)
            _move(segment, c.sign(), 1, rounding)
            segment.exp_avg.view(-1).copy_(_new_momentum(segment, segment.grad))


def add_outer_momentum(
    params: Sequence[Tensor],
    starts: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool,
    lr: float,
) -> None:
    for param, start, buffer in zip(params, starts, buffers, strict=True):
        moved = start - param
        # Separate products and sums: fused ones would round differently on another device.
        buffer.mul_(momentum).add_(moved)
        move = buffer * momentum + moved if nesterov else buffer
        param.copy_(start - move * lr)


# Checks.


def digests(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.stack([digest_bits(tensor) for tensor in tensors])


def square_sums(tensor: Tensor) -> Tensor:
    chunks = torch.split(tensor.view(-1), CHUNK_ELEMENTS)
    return torch.cat([sum_by_halving(cut_blocks(chunk).double().square()) for chunk in chunks])


def write_frames(out: Tensor, front: bytes, payloads: Tensor, *, checksum_at: int) -> None:
    rest = checksum_at + CHECKSUM_BYTES
    out[:, len(front) :] = payloads
    out[:, : len(front)] = torch.tensor(list(front), dtype=torch.uint8, device="cpu")
    for frame in out.numpy():
        checksum = zlib.crc32(frame[rest:].tobytes(), zlib.crc32(frame[:checksum_at].tobytes()))
        frame[checksum_at:rest] = list(checksum.to_bytes(CHECKSUM_BYTES, "little"))


def read_frames(
    rows: Tensor, heads: bytes, mask: bytes, expected: FrameFormat
) -> tuple[bool, Tensor, Tensor]:
    checksum_at, rest = expected.checksum_at, expected.checksum_at + CHECKSUM_BYTES
    intact, present, is_expected = [], [], True
    for number, frame in enumerate(rows.numpy()):
        checksum = zlib.crc32(frame[rest:].tobytes(), zlib.crc32(frame[:checksum_at].tobytes()))
        intact.append(
            frame[checksum_at:rest].tobytes() == checksum.to_bytes(CHECKSUM_BYTES, "little")
        )
        head = heads[number * len(mask) :][: len(mask)]
        pairs = zip(frame.tolist(), head, mask, strict=False)
        is_expected &= intact[-1] and not any(
            (found ^ wanted) & bits for found, wanted, bits in pairs
        )
        presence = frame[expected.presence_at :]
        if expected.has_counts:
            numbers = presence[: 2 * expected.n_params].reshape(-1, 2).tolist()
            present.append([low + 256 * high for low, high in numbers])
        else:
            bits = np.unpackbits(presence, count=expected.n_params, bitorder="little")
            present.append(bits.tolist())
    counts = torch.tensor(present, dtype=torch.int64, device="cpu")
    flags = torch.tensor(intact, dtype=torch.bool, device="cpu")
    return is_expected, flags, counts.view(len(rows), expected.n_params)
