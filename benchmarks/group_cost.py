"""Measure the construction time that one more Gloo group adds to an optimizer.

    python benchmarks/group_cost.py [--workers 2 4 8] [--rounds 30]

Workers on this machine make groups one after the other, as each optimizer makes its own. The time
is that of the slowest worker, from a barrier on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distlion.wire.groups import own_group


def work(rank: int, world_size: int, port: int, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    times, kept = [], []
    for number in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        kept.append(own_group(dist.group.WORLD, name=str(number), timeout_s=60))
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(1e3 * float(took))
    if rank == 0:
        Path(out).write_text(json.dumps(times[2:]))
    dist.barrier()
    dist.destroy_process_group()


def measure(workers: int, rounds: int) -> list[float]:
    """Return the milliseconds of each round."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process keeps the store
        mp.spawn(work, (workers, store.port, rounds, out), nprocs=workers)  # type: ignore[attr-defined]
        times: list[float] = json.loads(Path(out).read_text())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    for workers in arguments.workers:
        low, middle, high = statistics.quantiles(measure(workers, arguments.rounds), n=4)
        print(f"{workers} workers: {middle:.1f} ms ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
