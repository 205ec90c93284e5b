"""The ops of ``reference.py`` for tensors on a CUDA device, whole buckets per launch.

Bitwise identical to the plain ones. Interpreted by Triton on the CPU (``TRITON_INTERPRET=1``),
the same kernels work on tensors there, thousands of times slower: for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coin
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS, ReplyFormat, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.cpu import note_writes
from distlion.kernels.gpu import bits, checks, count, encode
from distlion.kernels.gpu import commit as committing
from distlion.kernels.gpu.launch import launch, launch_part, list_runs
from distlion.kernels.gpu.table import (
    ALIGN_BYTES,
    FIELDS,
    KINDS,
    SegmentTable,
    map_tiles,
    read_segments,
    upload,
    upload_table,
)
from distlion.kernels.reference import Kernels
from distlion.kernels.words import mix_words

FORMATS = {
    ReplyFormat.SIGN: committing.SIGN.value,
    ReplyFormat.TERNARY: committing.TERNARY.value,
    ReplyFormat.COUNT: committing.COUNT.value,
}
OWN, NO_REPLY = committing.OWN.value, committing.NO_REPLY.value


class TritonKernels(Kernels):
    """The ops, on the device of the tensors given.

    By plain torch there: votes with scales, and outer momenta. Frames lie in host memory.

    Raises:
        InvalidArgumentError: From an op: a tensor has another dtype, size or device than the
            contract says, or one of a segment or ``out`` is not contiguous.
    """

    def gather(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return _Gathered(segments, read_segments(segments))

    def encode_signs(self, segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
        return _encode(segments, encode.SIGNS.value, out, zero=zero)

    def encode_ternary(self, segments: Sequence[Segment], *, out: Tensor) -> Tensor:
        return _encode(segments, encode.TERNARY.value, out)

    def encode_pairs(self, segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
        return _encode(segments, encode.PAIRS.value, out, zero=zero)

    def encode_levels(
        self,
        segments: Sequence[Segment],
        zero: Coin,
        *,
        norm: Literal["l1", "linf"],
        step: float,
        out: Tensor,
    ) -> Tensor:
        vote = encode.LEVELS.value
        return _encode(segments, vote, out, zero=zero, is_l1=norm == "l1", width=step)

    def encode_directions(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        return _encode(segments, encode.DIRECTIONS.value, out, direction=_check_direction(dtype))

    def count_signs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        reply = ReplyFormat.TERNARY if tie is None else ReplyFormat.SIGN
        _count(votes, out, reply=reply, tie=tie)

    def count_ternary(self, votes: BlockVotes, *, out: Tensor) -> None:
        _count(votes, out, reply=ReplyFormat.TERNARY, vote=encode.TERNARY.value)

    def count_pairs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        reply = ReplyFormat.TERNARY if tie is None else ReplyFormat.SIGN
        _count(votes, out, reply=reply, vote=encode.PAIRS.value, tie=tie)

    def count_ones(self, votes: BlockVotes, *, out: Tensor) -> None:
        _count(votes, out, reply=ReplyFormat.COUNT)

    def count_levels(self, votes: BlockVotes, tie: Coin, *, out: Tensor) -> None:
        _count(votes, out, reply=ReplyFormat.SIGN, tie=tie)

    def sum_directions(self, votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None:
        _count(
            votes,
            out,
            reply=ReplyFormat.TERNARY,
            vote=encode.DIRECTIONS.value,
            direction=_check_direction(dtype),
        )

    def commit(
        self,
        segments: Sequence[Segment],
        present: Sequence[int],
        reply: Tensor,
        *,
        reply_format: ReplyFormat,
        rounding: Coin | None,
    ) -> None:
        _commit(segments, present, reply, FORMATS[reply_format], rounding)
        note_writes(segments, present)

    def update_momentum(self, segments: Sequence[Segment], present: Sequence[int]) -> None:
        _commit(segments, present, None, NO_REPLY, None)
        note_writes(segments, present, param=False)

    def step_alone(self, segments: Sequence[Segment], *, rounding: Coin | None) -> None:
        moved = [segment.grad is not None for segment in segments]
        _commit(segments, moved, None, OWN, rounding)
        note_writes(segments, moved)

    def check_finite(self, segments: Sequence[Segment]) -> Tensor:
        return _encode(segments, encode.NONE.value, None)

    def digests(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        contiguous = [tensor.contiguous() for tensor in tensors]
        device = contiguous[0].device
        rows = np.zeros((1 + len(tensors), FIELDS), dtype=np.int64)
        for row, tensor in zip(rows[1:], contiguous, strict=True):
            address = tensor.data_ptr()
            row[bits.PARAM.value], row[bits.N_ELEMENTS.value] = address, tensor.numel()
            row[bits.ALIGNED.value] = address % ALIGN_BYTES == 0
        # The sums begin with the numbers of elements.
        totals = upload(rows[1:, bits.N_ELEMENTS.value].copy(), device)
        tiles, parts = map_tiles(rows, [tensor.element_size() for tensor in contiguous])
        table = upload_table(rows, tiles, device)
        for part in parts:
            launch_part(checks.digest_kernel, part, table, totals, BYTES=part.kind, numbers=False)
        return mix_words(totals)

    def square_sums(self, tensor: Tensor) -> Tensor:
        n_blocks = -(-tensor.numel() // SCALE_BLOCK_ELEMENTS)
        out = torch.empty(n_blocks, dtype=torch.float64, device=tensor.device)
        elements = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            elements = elements.view(torch.uint16)
        launch(
            checks.square_sums_kernel,
            n_blocks,
            elements,
            tensor.numel(),
            out,
            KIND=KINDS[tensor.dtype],
        )
        return out


class _Gathered(tuple[Segment, ...]):
    """Segments with their table."""

    table: SegmentTable

    def __new__(cls, segments: Sequence[Segment], table: SegmentTable) -> _Gathered:
        gathered = super().__new__(cls, segments)
        gathered.table = table
        return gathered


def _read(segments: Sequence[Segment]) -> SegmentTable:
    return segments.table if isinstance(segments, _Gathered) else read_segments(segments)


def _encode(
    segments: Sequence[Segment],
    vote: int,
    out: Tensor | None,
    *,
    zero: Coin | None = None,
    is_l1: bool = False,
    width: float = 0.0,
    direction: int = bits.FLOAT32.value,
) -> Tensor:
    """Encode, then blank votes that are not finite. Without ``out``: only check."""
    table = _read(segments)
    if out is not None:
        if segments:
            table.check_room(out)
        out.zero_()
    if not table.parts:
        # Without segments, only the output says which device is meant.
        device = table.device if segments or out is None else out.device
        return torch.ones(len(segments), dtype=torch.bool, device=device)
    is_linear = vote == encode.DIRECTIONS.value
    stored = torch.uint16 if direction == bits.BFLOAT16.value else torch.float32
    there = upload_table(
        table.rows, table.tiles, table.device, coin=zero, width=width, n_flags=len(segments)
    )
    flags = there.flags.view(torch.int8)
    # Without output, the flags take its place.
    target, planes = (flags, 1) if out is None else (out.view(-1), out.shape[1])
    for part in table.parts:
        kind, m_kind = part.kind
        launch_part(
            encode.encode_kernel,
            part,
            there,
            target.view(stored if is_linear else torch.int32) if out is not None else flags,
            flags,
            VOTE=vote,
            PLANES=planes,
            L1=is_l1,
            DIRECTION=direction,
            KIND=kind,
            M_KIND=m_kind,
        )
        if out is not None:
            halves = target.view(torch.int32)
            launch_part(
                encode.blank_kernel,
                part,
                there,
                halves,
                flags,
                PLANES=planes,
                LINEAR=is_linear,
                numbers=False,
            )
    return there.flags


def _commit(
    segments: Sequence[Segment],
    present: Sequence[int],
    reply: Tensor | None,
    reply_format: int,
    rounding: Coin | None,
) -> None:
    table = _read(segments)
    rows = table.mark_present(present, counts=reply_format == committing.COUNT.value)
    if reply is not None and segments:
        reply = reply.contiguous()
        table.check_room(reply)
    if not table.parts:
        return
    there = upload_table(rows, table.tiles, table.device, coin=rounding)
    for part in table.parts:
        kind, m_kind = part.kind
        launch_part(
            committing.commit_kernel,
            part,
            there,
            # Without a reply, the tile map takes its place.
            there.tiles if reply is None else reply.view(-1).view(torch.int32),
            FORMAT=reply_format,
            PLANES=1 if reply is None else reply.shape[1],
            STOCHASTIC=rounding is not None and kind == bits.BFLOAT16.value,
            KIND=kind,
            M_KIND=m_kind,
        )


def _count(
    votes: BlockVotes,
    out: Tensor,
    *,
    reply: ReplyFormat,
    vote: int = encode.LEVELS.value,
    tie: Coin | None = None,
    direction: int = bits.FLOAT32.value,
) -> None:
    packed, present, bucket, first_block = votes
    n_workers, n_blocks, planes, _ = packed.shape
    if not out.is_contiguous() or out.device != packed.device or len(out) != n_blocks:
        raise InvalidArgumentError(
            f"out: given {tuple(out.shape)} on {out.device}, strides {out.stride()}; expected "
            f"{n_blocks} blocks on {packed.device}, contiguous"
        )
    out.zero_()
    rows, voters = list_runs(bucket, present.numpy(), first_block, n_blocks)
    tiles, parts = map_tiles(rows, [None] * len(voters))
    if not parts:
        return
    is_linear = vote == encode.DIRECTIONS.value
    is_half = direction == bits.BFLOAT16.value
    stored = (torch.uint16 if is_half else torch.float32) if is_linear else torch.int32
    there = upload_table(rows, tiles, packed.device, coin=tie)
    flat = packed.contiguous().view(-1).view(stored)
    launch_part(
        count.count_kernel,
        parts[0],
        there._replace(numbers=upload(voters, packed.device)),
        flat,
        out.view(-1).view(torch.int32),
        n_workers,
        flat.numel() // n_workers,
        VOTE=vote,
        PLANES=planes,
        DIRECTION=direction,
        REPLY=FORMATS[reply],
        REPLY_PLANES=out.shape[1],
        WEIGHTED=present.dtype != torch.bool,
    )


def _check_direction(dtype: torch.dtype) -> int:
    if dtype not in (torch.float32, torch.bfloat16):
        raise InvalidArgumentError(f"dtype is {dtype}, expected torch.float32 or torch.bfloat16")
    return KINDS[dtype]
