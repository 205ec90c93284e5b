"""The cut of each orthogonalized matrix over the ranks of a worker: shards, or pieces of a node."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distlion.errors import UnsupportedTypeError
from distlion.kernels import matrix_shape
from distlion.options.shard_pieces import locate_shard
from distlion.step import Box, CutMatrix, VotingParam
from distlion.transport import Transport, gather_bytes


def find_matrices(
    params: Sequence[VotingParam], link: Transport, *, is_sharded: bool, step: int
) -> dict[int, CutMatrix]:
    """Find the cut of each matrix to orthogonalize; every rank of the worker must call it.

    Args:
        params: The trainable parameters.
        link: The link between the ranks of this worker.
        is_sharded: Whether they hold shards; else the pieces of a node.
        step: The step that errors name.

    Returns:
        The matrices, by the position of their parameters.

    Raises:
        UnsupportedTypeError: Shards do not add up to a matrix; on every rank of the worker.
    """
    chosen = [param for param in params if param.orthogonalizes]
    if is_sharded and chosen:
        cuts = _gather_boxes(chosen, link, step=step)
    else:
        cuts = [tuple((ends,) for ends in param.pieces) for param in chosen]
    found = {}
    for param, boxes in zip(chosen, cuts, strict=True):
        whole = param.param
        shape = tuple(whole.shape) if is_sharded else (whole.numel(),)
        n_held = sum(math.prod(stop - start for start, stop in box) for box in set(boxes))
        matrix = matrix_shape(whole.shape)
        if matrix is None or n_held != whole.numel():
            raise UnsupportedTypeError(
                f"orthogonalize=True and {param.name}, of which the ranks of a worker hold the "
                f"pieces {sorted(set(boxes))}. Expected pieces that add up to {shape} without "
                "overlap, as FSDP2 cuts parameters. Leave orthogonalize out for it"
            )
        found[param.position] = CutMatrix(param.position, matrix, shape, boxes)
    return found


def _gather_boxes(
    params: Sequence[VotingParam], link: Transport, *, step: int
) -> list[tuple[Box, ...]]:
    """Gather the place of each rank's shard of each parameter."""
    own = [ends for param in params for ends in locate_shard(param.param)]
    raw = gather_bytes(link, np.array(own, np.int64).tobytes(), step=step)
    rows = [np.frombuffer(row, np.int64).reshape(-1, 2).tolist() for row in raw]
    cuts, at = [], 0
    for param in params:
        dims = slice(at, at := at + param.param.ndim)
        cuts.append(tuple(tuple((start, stop) for start, stop in row[dims]) for row in rows))
    return cuts
