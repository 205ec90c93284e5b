"""The launch of a kernel: its programs, their threads, and exact arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distlion.kernels.gpu import bits
from distlion.kernels.gpu.table import FIELDS, Part, Rows, Uploaded
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, BucketLayout

N_WARPS = 4
"""Fewer than 8, so that a thread has 32 elements, which share its one-time work."""
MOST_REGISTERS = 128
"""So that four programs share a multiprocessor: faster than three without a spilled register."""
OPTIONS = {"num_warps": N_WARPS, "maxnreg": MOST_REGISTERS, "enable_fp_fusion": False}
"""Options of every kernel. If fused, a product and a sum would round only once."""


def launch_part(
    kernel: Any,
    part: Part,
    table: Uploaded,
    *arguments: Any,
    numbers: bool = True,
    **constants: Any,
) -> None:
    """Launch a kernel over the tiles of one part of a table."""
    tables = (table.rows, table.numbers) if numbers else (table.rows,)
    tiles = table.tiles[part.begin : part.end]
    launch(kernel, part.end - part.begin, *tables, tiles, *arguments, **constants)


def launch(kernel: Any, grid: int | tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current stream of its tensors' device."""
    grid = grid if isinstance(grid, tuple) else (grid,)
    if not all(grid):
        return
    device = next(one.device for one in arguments if isinstance(one, Tensor))
    with _entered(device):
        kernel[grid](*arguments, **constants, **OPTIONS)


def _entered(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cuda":
        return torch.cuda.device(device)
    # The interpreter computes with NumPy, which would warn where a device does not.
    return np.errstate(all="ignore")


def list_runs(
    bucket: BucketLayout,
    present: npt.NDArray[np.bool_ | np.uint8],
    first_block: int,
    n_blocks: int,
) -> tuple[Rows, npt.NDArray[np.int32]]:
    """List the runs that some worker votes for.

    Args:
        bucket: The layout of the parameters.
        present: (workers, n_params), as in ``BlockVotes``.
        first_block: The first of the blocks at hand.
        n_blocks: Number of these blocks.

    Returns:
        The rows of a table, header included, and (runs, workers): the times that each vote counts.
    """
    begin, end = first_block * BLOCK_WORDS, (first_block + n_blocks) * BLOCK_WORDS
    fields, members = [], []
    n_present = present.sum(0, dtype=np.int64)
    for index, slot in enumerate(bucket.slots):
        first = max(begin, slot.bucket_word)
        if first >= min(end, slot.bucket_word + slot.n_words) or not n_present[index]:
            continue
        skipped = first - slot.bucket_word
        left = slot.n_elements - skipped * WORD_ELEMENTS
        n_elements = min((end - first) * WORD_ELEMENTS, left)
        members.append(index)
        fields.append((n_elements, first - begin, slot.first_word + skipped, slot.first_bit))
    rows = np.zeros((1 + len(fields), FIELDS), dtype=np.int64)
    if fields:
        rows[1:, bits.N_ELEMENTS.value : bits.FIRST_BIT.value + 1] = fields
        rows[1:, bits.PRESENT.value] = n_present[members]
    return rows, np.ascontiguousarray(present.T[members], dtype=np.int32)
