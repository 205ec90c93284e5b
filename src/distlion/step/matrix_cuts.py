"""The cut of each orthogonalized matrix over the ranks of a worker: shards, or pieces of a node."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Sequence

import torch

from distlion.errors import UnsupportedTypeError
from distlion.kernels.orthogonal import matrix_shape
from distlion.step.cut_matrices import Box, CutMatrix
from distlion.step.param import VotingParam
from distlion.step.shard_pieces import locate_shard
from distlion.wire.ask import ask_texts
from distlion.wire.transport import Transport


def find_matrices(
    params: Sequence[VotingParam], link: Transport, *, step: int
) -> dict[int, CutMatrix]:
    """Find the cut of each matrix to orthogonalize; every rank of the worker must call it.

    Args:
        params: The trainable parameters.
        link: The link between the ranks of this worker.
        step: The step that errors name.

    Returns:
        The matrices, by the position of their parameters.

    Raises:
        UnsupportedTypeError: Shards do not add up to a matrix; on every rank of the worker.
    """
    chosen = [param for param in params if param.orthogonalizes]
    found: dict[int, CutMatrix] = {}
    if not chosen:
        return found
    for param, (boxes, on_host) in zip(chosen, _gather_cuts(chosen, link, step=step), strict=True):
        whole = param.param
        shape = tuple(whole.shape) if param.is_sharded else (whole.numel(),)
        matrix = matrix_shape(whole.shape)
        if matrix is None or not _tile(set(boxes), whole.numel()):
            raise UnsupportedTypeError(
                f"orthogonalize=True and {param.name}, of which the ranks of a worker hold the "
                f"pieces {sorted(set(boxes))}. Expected pieces that add up to {shape} without "
                "overlap, as FSDP2 cuts parameters. Leave orthogonalize out for it"
            )
        # That of products, unless some rank of the worker has them in float32.
        dtype = torch.float32 if on_host else torch.bfloat16
        found[param.position] = CutMatrix(param.position, matrix, shape, boxes, dtype)
    return found


def _tile(boxes: Collection[Box], n_elements: int) -> bool:
    """Return whether boxes cover so many elements, each of them once."""
    n_held = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    meet = any(
        all(max(starts) < min(stops) for starts, stops in map(zip, one, other))
        for one, other in itertools.combinations(boxes, 2)
    )
    return n_held == n_elements and not meet


def _gather_cuts(
    params: Sequence[VotingParam], link: Transport, *, step: int
) -> list[tuple[tuple[Box, ...], bool]]:
    """Gather each rank's piece of each parameter, and whether some piece is on a CPU."""
    own = [
        (
            locate_shard(param.param) if param.is_sharded else (param.pieces[param.part],),
            param.device.type == "cpu",
        )
        for param in params
    ]
    rows = map(json.loads, ask_texts(link, json.dumps(own), step=step))
    return [
        (tuple(tuple(map(tuple, box)) for box, _ in held), any(on_host for _, on_host in held))
        for held in zip(*rows, strict=True)
    ]
