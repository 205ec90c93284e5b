"""The launch of a kernel: its programs, their threads, and exact arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlion.kernels.gpu.table import Part, Uploaded

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
