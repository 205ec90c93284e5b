"""What orthogonalized directions cost: products in theory, and a worker's encoding, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rates import time_in_turn

from distlion import MajorityVote
from distlion.kernels import Coefficients, Coins, Segment, choose_kernels
from distlion.kernels.orthogonal import orthogonalize_directions
from distlion.layout import BLOCK_WORDS, fill_buckets, place_parameters

Shape = tuple[int, int]
HYPER = Coefficients(0.9, 0.95, 1e-4, 0.1, orthogonalize=True)
N_ITERATIONS = 5
REPETITIONS = 20
GPT2 = ((12, 768), (24, 1024))
"""Layers and width of GPT-2's two smallest, 124 M and 355 M."""


def count_flops(shape: Shape) -> int:
    """Count what five Newton-Schulz iterations multiply and add, of a matrix of m <= n.

    Each is X X^T, 2 m^2 n, its square, 2 m^3, and a product with X, 2 m^2 n.
    """
    m, n = sorted(shape)
    return N_ITERATIONS * (4 * m * m * n + 2 * m**3)


def list_gpt2_matrices(layers: int, width: int) -> list[Shape]:
    """List the hidden matrices: those of attention and of the MLP."""
    block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return block * layers


def make_calls(shapes: Sequence[Shape], device: str) -> dict[str, Callable[[], object]]:
    """Make the calls that encode one worker's majority vote on float32 matrices."""
    kernels = choose_kernels(torch.device(device))
    sizes = [math.prod(shape) for shape in shapes]
    slots = place_parameters([f"p{index}" for index in range(len(sizes))], sizes)
    (bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=1, bucket_elements=1 << 40)
    segments = [
        Segment(slot, *(torch.randn(shape, device=device) for _ in range(3)), HYPER)
        for slot, shape in zip(bucket.slots, shapes, strict=True)
    ]
    out = torch.empty((bucket.n_blocks, 1, BLOCK_WORDS), dtype=torch.int64, device=device)
    rule, coins = MajorityVote(), Coins(0, 0, 0)

    def encode_plain() -> None:
        rule.encode(kernels, segments, coins, out=out)

    def encode_orthogonalized() -> None:
        rule.encode(kernels, orthogonalize_directions(kernels, segments), coins, out=out)

    return {"plain": encode_plain, "orthogonalized": encode_orthogonalized}


def measure_orthogonal(*, rehearses: bool) -> dict[str, Any]:
    """Measure both encodings of GPT-2's hidden matrices, batched by shape in bfloat16."""
    device, on_gpu = ("cpu", False) if rehearses else ("cuda", True)
    rows = []
    for layers, width in ((2, 8),) if rehearses else GPT2:
        shapes = list_gpt2_matrices(layers, width)
        calls = make_calls(shapes, device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        times = time_in_turn(calls, 2 if rehearses else REPETITIONS, on_gpu=on_gpu)
        added_s = times["orthogonalized"]["device_s"] - times["plain"]["device_s"]
        flops = sum(map(count_flops, shapes))
        rows.append(
            {
                "layers": layers,
                "width": width,
                "n_elements": sum(map(math.prod, shapes)),
                "plain_ms": times["plain"]["device_s"] * 1e3,
                "orthogonalized_ms": times["orthogonalized"]["device_s"] * 1e3,
                "host_ms": times["orthogonalized"]["host_s"] * 1e3,
                "tflops": flops / 1e12,
                "tflop_per_s": flops / 1e12 / added_s,
                "scratch_mib": (
                    (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
                ),
            }
        )
    return {"ok": True, "rows": rows}
