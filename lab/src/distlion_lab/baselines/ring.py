"""Bytes that a worker sends in the ring collectives of Gloo and NCCL."""

from __future__ import annotations

FLOAT32_BYTES = 4


def ring_all_reduce_bytes(
    n_elements: int, world_size: int, *, element_bytes: int = FLOAT32_BYTES
) -> int:
    """Count the bytes that each worker sends in a ring all-reduce.

    Equation:
        2 (N - 1) / N * e n    (reduce-scatter and all-gather, each N - 1 pieces of n / N numbers)
        N is ``world_size``, n is ``n_elements``, e is ``element_bytes``; rounded down to whole
        bytes.
    """
    return 2 * (world_size - 1) * element_bytes * n_elements // world_size


def ring_all_gather_bytes(n_bytes: int, world_size: int) -> int:
    """Count the bytes that each worker sends in a ring all-gather of ``n_bytes`` from each.

    Equation:
        (N - 1) * n_bytes    (its own piece, then each arriving piece but the last)
    """
    return (world_size - 1) * n_bytes
