"""The table for one launch per bucket: a kernel's data of each parameter, in one upload.

    row 0          key and inversion of a coin; the width of a level
    row 1 + i      addresses, sizes, places and rounded coefficients of parameter i
    tile map       int32: which parameter a program works on; a part for each kind of parameter

All numbers that change from step to step are in the table. A number given to a kernel as an
argument would be compiled in, or rounded to float32. A table is uploaded from its own pinned
memory, which nobody writes to again, so that the host does not wait for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels.coin import Coin
from distlion.kernels.contract import EXP_AVG_DTYPES, PARAM_DTYPES, Segment
from distlion.kernels.gpu import bits
from distlion.kernels.words import signed
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS

Rows = npt.NDArray[np.int64]

KINDS: dict[torch.dtype, int] = {
    torch.float32: bits.FLOAT32.value,
    torch.bfloat16: bits.BFLOAT16.value,
    torch.float16: bits.FLOAT16.value,
}
FIELDS, TILE = bits.FIELDS.value, bits.TILE.value
ALIGN_BYTES = 16
_MAP_ALIGN = 16
"""Parts of the tile map begin at multiples of this many numbers, as kernels expect."""


class Part(NamedTuple):
    """The tiles of the parameters of one kind.

    Attributes:
        kind: Their dtypes.
        begin, end: Their range in the tile map.
    """

    kind: Any
    begin: int
    end: int


class Uploaded(NamedTuple):
    """A table on the device, in the form for kernels, with space for a flag of each parameter."""

    rows: Tensor
    numbers: Tensor
    tiles: Tensor
    flags: Tensor


def map_tiles(rows: Rows, kinds: Sequence[Any]) -> tuple[npt.NDArray[np.int32], list[Part]]:
    """Cut parameters into tiles, kind after kind, and number the first tile of each in its row."""
    n_tiles = -(-rows[1:, bits.N_ELEMENTS.value] // TILE)
    by_kind: dict[Any, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(index)
    pieces, parts, begin = [], [], 0
    for kind, members in by_kind.items():
        numbers = np.asarray(members, dtype=np.int32)
        counts = n_tiles[numbers]
        ends = np.cumsum(counts)
        rows[1 + numbers, bits.FIRST_TILE.value] = ends - counts
        total = int(ends[-1])
        padded = -(-total // _MAP_ALIGN) * _MAP_ALIGN
        piece = np.zeros(padded, dtype=np.int32)
        piece[:total] = np.repeat(numbers, counts)
        pieces.append(piece)
        if total:
            parts.append(Part(kind, begin, begin + total))
        begin += padded
    tiles = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    return tiles, parts


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_table(
    rows: Rows,
    tiles: npt.NDArray[np.int32],
    device: torch.device,
    *,
    coin: Coin | None = None,
    width: float = 0.0,
    n_flags: int = 0,
) -> Uploaded:
    """Put rows with header, tile map and raised flags into one buffer, and copy it."""
    n_rows, n_tables = rows.size, rows.size + tiles.size // 2
    buffer = np.empty(n_tables + -(-n_flags // 8), dtype=np.int64)
    buffer[:n_rows] = rows.reshape(-1)
    buffer[n_rows:n_tables] = tiles.view(np.int64)
    buffer[n_tables:].view(np.uint8)[:] = 1
    if coin is not None:
        buffer[bits.KEY.value] = signed(coin.key)
        buffer[bits.INVERTED.value] = -1 if coin.inverted else 0
    buffer[bits.WIDTH.value] = np.float64(width).view(np.int64)
    there = upload(buffer, device)
    return Uploaded(
        there[:n_rows],
        there[:n_rows].view(torch.float32),
        there[n_rows:n_tables].view(torch.int32),
        there[n_tables:].view(torch.bool)[:n_flags],
    )


@dataclass(frozen=True)
class SegmentTable:
    """The segments of a bucket, read and checked once for several ops.

    Attributes:
        rows: (1 + n, FIELDS) int64; the header and PRESENT are still 0.
        lr: (n,) float64.
        tiles: The tile map.
        parts: Its parts; the kind is (parameter's, momentum's), as ``KINDS`` numbers them.
        device: The device of all tensors.
    """

    rows: Rows
    lr: npt.NDArray[np.float64]
    tiles: npt.NDArray[np.int32]
    parts: list[Part]
    device: torch.device

    def check_room(self, packed: Tensor) -> None:
        """Refuse a packed tensor that is not on the device, contiguous and large enough.

        Only ops that pack need the segments' places in a bucket.
        """
        if packed.device != self.device or not packed.is_contiguous():
            raise InvalidArgumentError(
                f"packed tensor: given {packed.device}, strides {packed.stride()}; expected a "
                f"contiguous one on {self.device}, where the parameters are"
            )
        begins = self.rows[1:, bits.BUCKET_WORD.value]
        ends = begins + -(-self.rows[1:, bits.N_ELEMENTS.value] // WORD_ELEMENTS)
        if (begins[1:] < ends[:-1]).any():
            raise InvalidArgumentError("segments overlap, or are not in the order of their bucket")
        if ends[-1] > len(packed) * BLOCK_WORDS:
            raise InvalidArgumentError(
                f"a packed tensor of {len(packed)} blocks, but the segments need {ends[-1]} words"
            )

    def mark_present(self, present: Sequence[int], *, counts: bool) -> Rows:
        """Return rows with the numbers of voters, and with a = lr / n for replies of counts."""
        n_present = np.asarray(present, dtype=np.int64).reshape(-1)
        if len(n_present) != len(self.lr) or (n_present < 0).any():
            raise InvalidArgumentError(
                f"present: given {list(present)}, expected {len(self.lr)} numbers from 0 up"
            )
        rows = self.rows.copy()
        rows[1:, bits.PRESENT.value] = n_present
        if counts:
            width = rows.view(np.float32)[1:, bits.STEP_WIDTH.value]
            with np.errstate(over="ignore"):
                width[:] = self.lr / np.maximum(n_present, 1)
        return rows


def read_segments(segments: Sequence[Segment]) -> SegmentTable:
    """Read addresses, sizes and coefficients.

    Raises:
        InvalidArgumentError: A tensor has another dtype, size or device than the contract says, or
            is not contiguous.
    """
    n = len(segments)
    device = segments[0].param.device if n else torch.device("cpu")
    fields, kinds = [], []
    for segment in segments:
        slot, param, grad, exp_avg, _ = segment
        _check_segment(segment, device)
        address, momentum = param.data_ptr(), exp_avg.data_ptr()
        slope = grad.data_ptr() if grad is not None else 0
        aligned = (address | momentum | slope) % ALIGN_BYTES == 0
        _, n_elements, first_word, bucket_word, first_bit = slot
        fields.append(
            (
                address,
                slope,
                momentum,
                n_elements,
                bucket_word,
                first_word,
                first_bit,
                0,
                0,
                aligned,
            )
        )
        kinds.append((KINDS[param.dtype], KINDS[exp_avg.dtype]))
    rows = np.zeros((1 + n, FIELDS), dtype=np.int64)
    lr = np.zeros(n)
    if n:
        rows[1:, : len(fields[0])] = fields
        lr = _round_coefficients(rows, segments)
    tiles, parts = map_tiles(rows, kinds)
    return SegmentTable(rows, lr, tiles, parts, device)


def _check_segment(segment: Segment, device: torch.device) -> None:
    slot, param, grad, exp_avg, _ = segment
    if param.dtype not in PARAM_DTYPES or exp_avg.dtype not in EXP_AVG_DTYPES:
        raise InvalidArgumentError(
            f"{slot.name}: parameter {param.dtype} and exp_avg {exp_avg.dtype}; expected one of "
            f"{PARAM_DTYPES} and one of {EXP_AVG_DTYPES}"
        )
    if grad is not None and grad.dtype != param.dtype:
        raise InvalidArgumentError(
            f"gradient of {slot.name}: given {grad.dtype}, expected {param.dtype}, the parameter's"
        )
    for tensor in (param, exp_avg) if grad is None else (param, exp_avg, grad):
        if (
            tensor.numel() != slot.n_elements
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise InvalidArgumentError(
                f"{slot.name}: given {tensor.numel()} elements on {tensor.device}, strides "
                f"{tensor.stride()}; expected {slot.n_elements} on {device}, contiguous"
            )


def _round_coefficients(rows: Rows, segments: Sequence[Segment]) -> npt.NDArray[np.float64]:
    """Compute the constants in double and round them once; return lr."""
    numbers = np.array([segment.coefficients for segment in segments], dtype=np.float64)
    beta1, beta2, lr, weight_decay, grad_scale, cautious, _ = numbers.T.copy()
    floats = rows.view(np.float32)[1:]
    for field, values in (
        (bits.BETA1, beta1),
        (bits.REST1, 1.0 - beta1),
        (bits.BETA2, beta2),
        (bits.REST2, 1.0 - beta2),
        (bits.DECAY, 1.0 - lr * weight_decay),
        (bits.STEP_WIDTH, lr),
        (bits.GRAD_SCALE, grad_scale),
        (bits.CAUTIOUS, cautious),
    ):
        with np.errstate(over="ignore"):
            floats[:, field.value] = values
    return np.asarray(lr)
