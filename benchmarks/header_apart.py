"""Price of headers that travel apart from payloads: two exchanges in the place of one.

A frame is a header of 64 bytes and the packed votes behind it, in one message, so that both lie in
memory of the host. If headers had a message of their own, votes could stay on a GPU. This measures
that exchange on this machine: ranks exchange a chunk with each peer, once with the header in front
of it and once with the header in an exchange of its own that is under way at the same time. The two
take turns, so that whatever slows the machine down slows both.

    python benchmarks/header_apart.py [--ranks 4] [--turns 200]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median, quantiles

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HEADER_BYTES = 64
CHUNK_BYTES = (1 << 10, 32 << 10, 1 << 20)


class Exchange:
    """Buffers of one size, and the two ways to exchange them."""

    def __init__(self, chunk_bytes: int, ranks: int) -> None:
        sizes = (HEADER_BYTES, chunk_bytes, HEADER_BYTES + chunk_bytes)
        self._sent = [torch.zeros(ranks * size, dtype=torch.uint8) for size in sizes]
        self._received = [torch.empty_like(sent) for sent in self._sent]

    def run(self, *kinds: int) -> float:
        """Exchange the buffers of these kinds at once, and return the seconds."""
        started = time.perf_counter()
        works = [
            dist.all_to_all_single(self._received[kind], self._sent[kind], async_op=True)
            for kind in kinds
        ]
        for work in works:
            work.wait()
        return time.perf_counter() - started


def measure(rank: int, ranks: int, turns: int, folder: str) -> None:
    """Take turns, and print the ratios on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    for chunk_bytes in CHUNK_BYTES:
        exchange = Exchange(chunk_bytes, ranks)
        exchange.run(0, 1)
        exchange.run(2)
        together, apart = [], []
        for _ in range(turns):
            dist.barrier()
            together.append(exchange.run(2))
            dist.barrier()
            apart.append(exchange.run(0, 1))
        if rank == 0:
            ratios = [b / a for a, b in zip(together, apart, strict=True)]
            q1, middle, q3 = quantiles(ratios, n=4, method="inclusive")
            print(
                f"{chunk_bytes:>9,} bytes to each of {ranks - 1} peers: together "
                f"{1e3 * median(together):.3f} ms, apart {1e3 * median(apart):.3f} ms, "
                f"{middle:.2f} times as long (quartiles {q1:.2f} to {q3:.2f})"
            )
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (arguments.ranks, arguments.turns, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
