"""Sizes on the wire of momenta that are averaged over workers."""

from __future__ import annotations

import torch

from distlion.exchange import BucketShape

SCALE_ELEMENTS = 256
"""Coordinates of an int8 row that share a scale; shards are a multiple of it."""

_ALIGN_BYTES = 64
_FLOAT_BYTES = 4


def shape_momenta(n_elements: int, n_workers: int, dtype: torch.dtype) -> BucketShape:
    """Size the exchange of ``n_elements`` momenta of each worker.

    Equation:
        shard = 256 ceil(n / (256 N)) coordinates; up ``dtype`` each, int8 with a float32 scale for
        every 256; down the mean in float32

    Args:
        n_elements: n, coordinates that move in one exchange.
        n_workers: N.
        dtype: What momenta are rounded to on the way up: float32, bfloat16 or int8.
    """
    shard = -(-n_elements // (SCALE_ELEMENTS * n_workers)) * SCALE_ELEMENTS
    scale_bytes = _FLOAT_BYTES * shard // SCALE_ELEMENTS if dtype is torch.int8 else 0
    vote_bytes = shard * dtype.itemsize + scale_bytes
    return BucketShape(
        n_shards=n_workers,
        n_params=1,
        vote_bytes=-(-vote_bytes // _ALIGN_BYTES) * _ALIGN_BYTES,
        reply_bytes=shard * _FLOAT_BYTES,
        has_counts=False,
    )
