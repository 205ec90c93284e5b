"""The C++ core: the ops of ``reference.py`` for tensors on the CPU, whole buckets per call.

Bitwise identical to the plain ones, with every instruction set and number of threads, except for
the bits of NaNs. Calls use up to ``torch.get_num_threads()`` threads and release the GIL. Its
source is in ``csrc/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, KernelBackendError
from distlion.kernels.coin import Coin
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS, FrameFormat, ReplyFormat, Segment
from distlion.kernels.counting import BlockVotes
from distlion.kernels.reference import Kernels
from distlion.layout import Slot

try:
    from distlion.kernels._cpu import Core, SegmentTable, instruction_sets
    from distlion.kernels._cpu import Makes as Makes
except ImportError as error:
    raise KernelBackendError(
        f"the C++ core of distlion cannot be imported ({error}); build it with 'pip install .' (or "
        "'make train') in a checkout, which needs a C++20 compiler, or set "
        "DISTLION_KERNELS=reference to use the slower plain torch kernels"
    ) from error

INSTRUCTION_SETS: tuple[str, ...] = tuple(instruction_sets())
"""Instruction sets that this machine runs, the most basic first."""


class CpuKernels(Kernels):
    """The ops for one instruction set.

    Args:
        instruction_set: One of ``INSTRUCTION_SETS``; None for the last one.

    Raises:
        InvalidArgumentError: The machine does not run it; from an op: a tensor has another dtype,
            size or device than the contract says, or one of a segment, an estimate, ``out``, or a
            frame or its payload is not contiguous. (Votes, replies and other read-only tensors are
            copied if necessary.)
    """

    def __init__(self, instruction_set: str | None = None) -> None:
        # torch has the table since 2.10; before, tensors are read by their attributes.
        exchange_api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        self.instruction_set = instruction_set or INSTRUCTION_SETS[-1]
        self._core = Core(self.instruction_set, exchange_api)

    def gather(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return _Gathered(segments, self._core.read_segments(segments))

    def _table(self, segments: Sequence[Segment]) -> SegmentTable:
        if isinstance(segments, _Gathered):
            return segments.table
        return self._core.read_segments(segments)

    def encode_signs(self, segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
        finite = _make_flags(segments)
        coin = (zero.key, zero.inverted)
        self._core.encode_signs(self._table(segments), *coin, out, finite, torch.get_num_threads())
        return finite

    def encode_ternary(self, segments: Sequence[Segment], *, out: Tensor) -> Tensor:
        finite = _make_flags(segments)
        self._core.encode_ternary(self._table(segments), out, finite, torch.get_num_threads())
        return finite

    def encode_pairs(self, segments: Sequence[Segment], zero: Coin, *, out: Tensor) -> Tensor:
        finite = _make_flags(segments)
        coin = (zero.key, zero.inverted)
        self._core.encode_pairs(self._table(segments), *coin, out, finite, torch.get_num_threads())
        return finite

    def encode_levels(
        self,
        segments: Sequence[Segment],
        zero: Coin,
        *,
        norm: Literal["l1", "linf"],
        step: float,
        out: Tensor,
    ) -> Tensor:
        finite = _make_flags(segments)
        self._core.encode_levels(
            self._table(segments),
            zero.key,
            zero.inverted,
            norm == "l1",
            step,
            out,
            finite,
            torch.get_num_threads(),
        )
        return finite

    def encode_directions(
        self, segments: Sequence[Segment], *, dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        finite = _make_flags(segments)
        self._core.encode_directions(
            self._table(segments), _is_bfloat16(dtype), out, finite, torch.get_num_threads()
        )
        return finite

    def encode_rests(
        self,
        segments: Sequence[Segment],
        estimates: Sequence[Tensor] | None,
        zero: Coin,
        *,
        out: Tensor,
        scales: Tensor,
        are_residuals: bool = False,
    ) -> Tensor:
        finite = _make_flags(segments)
        read = (self._table(segments), segments, estimates, are_residuals)
        threads = torch.get_num_threads()
        self._core.encode_rests(*read, zero.key, zero.inverted, out, scales, finite, threads)
        return finite

    def encode_lots(
        self,
        segments: Sequence[Segment],
        lot: Coin,
        *,
        out: Tensor,
        scales: Tensor,
        reach: Sequence[float] = (),
        spread: float | None = None,
    ) -> Tensor:
        finite = _make_flags(segments)
        read = (self._table(segments), reach, spread, lot.key, lot.inverted)
        self._core.encode_lots(*read, out, scales, finite, torch.get_num_threads())
        return finite

    def move_residuals(
        self,
        segments: Sequence[Segment],
        residuals: Sequence[Tensor],
        votes: Tensor,
        scales: Tensor,
        finite: Tensor,
    ) -> None:
        said = (votes.contiguous(), scales.contiguous(), finite, torch.get_num_threads())
        self._core.move_residuals(self._table(segments), segments, residuals, *said)
        torch.autograd.graph.increment_version(residuals)

    def add_steps(
        self,
        estimates: Sequence[Tensor],
        slots: Sequence[Slot],
        present: Sequence[bool],
        votes: Tensor,
        scales: Tensor,
    ) -> None:
        said = (present, votes.contiguous(), scales.contiguous())
        self._core.add_steps(estimates, slots, *said, torch.get_num_threads())
        torch.autograd.graph.increment_version(estimates)

    def add_steps_of_all(self, estimates: Tensor, votes: BlockVotes, scales: Tensor) -> None:
        packed, present, slots, first_block = _read_votes(votes)
        said = (estimates, packed, scales.contiguous(), present)
        self._core.add_steps_of_all(*said, slots, first_block, torch.get_num_threads())

    def count_steps(
        self,
        votes: BlockVotes,
        scales: Tensor,
        tie: Coin,
        *,
        weights: Sequence[int],
        estimates: Tensor | None,
        out: Tensor,
        sums: Tensor,
    ) -> None:
        packed, present, slots, first_block = _read_votes(votes)
        said = (packed, scales.contiguous(), present, slots, first_block, weights, estimates)
        coin, threads = (tie.key, tie.inverted), torch.get_num_threads()
        self._core.count_steps(*said, *coin, out, sums, threads)

    def count_signs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        if tie is None:
            self._core.count_signs_or_zero(*_read_votes(votes), out, torch.get_num_threads())
        else:
            self._core.count_signs(
                *_read_votes(votes), tie.key, tie.inverted, out, torch.get_num_threads()
            )

    def count_ternary(self, votes: BlockVotes, *, out: Tensor) -> None:
        self._core.count_ternary(*_read_votes(votes), out, torch.get_num_threads())

    def count_pairs(self, votes: BlockVotes, tie: Coin | None, *, out: Tensor) -> None:
        if tie is None:
            self._core.count_pairs_or_zero(*_read_votes(votes), out, torch.get_num_threads())
        else:
            self._core.count_pairs(
                *_read_votes(votes), tie.key, tie.inverted, out, torch.get_num_threads()
            )

    def count_ones(self, votes: BlockVotes, *, out: Tensor) -> None:
        self._core.count_ones(*_read_votes(votes), out, torch.get_num_threads())

    def count_levels(self, votes: BlockVotes, tie: Coin, *, out: Tensor) -> None:
        self._core.count_levels(
            *_read_votes(votes), tie.key, tie.inverted, out, torch.get_num_threads()
        )

    def sum_directions(self, votes: BlockVotes, *, dtype: torch.dtype, out: Tensor) -> None:
        self._core.sum_directions(
            *_read_votes(votes), _is_bfloat16(dtype), out, torch.get_num_threads()
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
        arguments = (reply_format.value, _draws(rounding), torch.get_num_threads())
        self._core.commit(self._table(segments), present, reply.contiguous(), *arguments)
        note_writes(segments, present)

    def update_momentum(self, segments: Sequence[Segment], present: Sequence[int]) -> None:
        self._core.update_momentum(self._table(segments), present, torch.get_num_threads())
        note_writes(segments, present, param=False)

    def step_alone(self, segments: Sequence[Segment], *, rounding: Coin | None) -> None:
        self._core.step_alone(self._table(segments), _draws(rounding), torch.get_num_threads())
        moved = [segment.grad is not None for segment in segments]
        note_writes(segments, moved)

    def add_outer_momentum(
        self,
        params: Sequence[Tensor],
        starts: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        momentum: float,
        nesterov: bool,
        lr: float,
    ) -> None:
        rates, threads = (momentum, nesterov, lr), torch.get_num_threads()
        self._core.add_outer_momentum(params, starts, buffers, *rates, threads)
        torch.autograd.graph.increment_version([*params, *buffers])

    def check_finite(self, segments: Sequence[Segment]) -> Tensor:
        finite = _make_flags(segments)
        self._core.check_finite(self._table(segments), finite, torch.get_num_threads())
        return finite

    def digests(self, tensors: Sequence[Tensor]) -> Tensor:
        out = torch.empty(len(tensors), dtype=torch.int64, device="cpu")
        contiguous = [tensor.contiguous() for tensor in tensors]
        self._core.digests(contiguous, out, torch.get_num_threads())
        return out

    def square_sums(self, tensor: Tensor) -> Tensor:
        n_blocks = -(-tensor.numel() // SCALE_BLOCK_ELEMENTS)
        out = torch.empty(n_blocks, dtype=torch.float64, device=tensor.device)
        self._core.square_sums(tensor.contiguous(), out, torch.get_num_threads())
        return out

    def write_frames(
        self, out: Tensor, front: bytes, payloads: Tensor, *, checksum_at: int
    ) -> None:
        self._core.write_frames(out, front, payloads, checksum_at, torch.get_num_threads())

    def read_frames(
        self, rows: Tensor, heads: bytes, mask: bytes, expected: FrameFormat
    ) -> tuple[bool, Tensor, Tensor]:
        intact = torch.empty(len(rows), dtype=torch.bool, device="cpu")
        present = torch.empty((len(rows), expected.n_params), dtype=torch.int64, device="cpu")
        checksum_at, presence_at, has_counts = (
            expected.checksum_at,
            expected.presence_at,
            expected.has_counts,
        )
        threads = torch.get_num_threads()
        is_expected = self._core.read_frames(
            rows, heads, mask, checksum_at, presence_at, has_counts, intact, present, threads
        )
        return is_expected, intact, present


class _Gathered(tuple[Segment, ...]):
    """Segments with the core's table of them."""

    table: SegmentTable

    def __new__(cls, segments: Sequence[Segment], table: SegmentTable) -> _Gathered:
        gathered = super().__new__(cls, segments)
        gathered.table = table
        return gathered


def _make_flags(segments: Sequence[Segment]) -> Tensor:
    return torch.empty(len(segments), dtype=torch.bool, device="cpu")


def _read_votes(votes: BlockVotes) -> tuple[Tensor, Tensor, Sequence[Slot], int]:
    packed, present, bucket, first_block = votes
    return packed.contiguous(), present.contiguous(), bucket.slots, first_block


def _draws(coin: Coin | None) -> tuple[int, bool] | None:
    return None if coin is None else (coin.key, coin.inverted)


def _is_bfloat16(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16):
        raise InvalidArgumentError(f"dtype is {dtype}, expected torch.float32 or torch.bfloat16")
    return dtype == torch.bfloat16


def note_writes(segments: Sequence[Segment], present: Sequence[int], *, param: bool = True) -> None:
    """Tell autograd of writes, as it refuses to differentiate through changed tensors."""
    written: list[Tensor] = []
    for index, segment in enumerate(segments):
        if not present[index]:
            continue
        if param:
            written.append(segment.param)
        if segment.grad is not None:
            written.append(segment.exp_avg)
    torch.autograd.graph.increment_version(written)
