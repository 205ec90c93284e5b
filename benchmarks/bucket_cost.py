"""Measure what one more bucket adds to a step: wall time, and processor time of a worker.

    python benchmarks/bucket_cost.py [--workers 2] [--elements 8388608] [--buckets 1 2 4 8 16 32]
        [--wire gloo tcp]

Workers on this machine vote on the same parameters, cut into more and more buckets; the cuts take
turns, and so do the transports. Processor time is that of all threads of a worker, the network
library's included. A bucket's cost is the slope of the least squares line through the medians.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import distlion
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire

WARM_UP = 5


def work(
    rank: int,
    world_size: int,
    port: int,
    n_elements: int,
    cuts: Sequence[int],
    wires: Sequence[str],
    turns: int,
    out: str,
) -> None:
    """Take steps with each cut and transport in turn, and write the medians of this worker."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    optimizers = []
    for n_buckets, wire in itertools.product(cuts, wires):
        os.environ[WIRE_VARIABLE] = wire
        most = max(cuts)
        params = [nn.Parameter(torch.randn(n_elements // most)) for _ in range(most)]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizers.append(
            distlion.DistributedLion(
                params,
                1e-4,
                exchange=distlion.AllReduce(),
                bucket_elements=n_elements // n_buckets,
                replicas=distlion.Replicas(check_every=None),
            )
        )
    seconds = np.zeros((turns, len(cuts) * len(wires), 2))
    for turn in range(WARM_UP + turns):
        for index, optimizer in enumerate(optimizers):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            optimizer.step()
            took = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            if turn >= WARM_UP:
                seconds[turn - WARM_UP, index] = took
    np.save(f"{out}/{rank}.npy", np.median(seconds, axis=0))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    world_size: int, n_elements: int, cuts: Sequence[int], wires: Sequence[str], turns: int
) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    """Return a step's median milliseconds, mean worker: (cuts, wires, [wall, processor])."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process keeps the store
        arguments = (world_size, store.port, n_elements, cuts, wires, turns, folder)
        mp.spawn(work, arguments, nprocs=world_size)  # type: ignore[attr-defined]
        each = [np.load(path) for path in sorted(Path(folder).glob("*.npy"))]
    return np.array(1e3 * np.mean(each, axis=0)).reshape(len(cuts), len(wires), 2)


def main() -> None:
    """Print a table, and the cost of a bucket."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elements", type=int, default=8 * 1024 * 1024, help="parameters")
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=40, help="steps with each number of buckets")
    parser.add_argument("--wire", nargs="+", default=[choose_wire()], choices=["gloo", "tcp"])
    arguments = parser.parse_args()
    cuts, wires = arguments.buckets, arguments.wire
    found = measure(arguments.workers, arguments.elements, cuts, wires, arguments.turns)
    print("| buckets | wire | wall, ms | processor, ms |\n| ---: | --- | ---: | ---: |")
    for (n_buckets, of_wires), (place, wire) in itertools.product(
        zip(cuts, found, strict=True), enumerate(wires)
    ):
        wall_ms, cpu_ms = of_wires[place]
        print(f"| {n_buckets} | {wire} | {wall_ms:.2f} | {cpu_ms:.2f} |")
    print()
    for place, wire in enumerate(wires):
        wall_ms, cpu_ms = (
            statistics.linear_regression(cuts, column)[0] for column in found[:, place].T
        )
        costs = f"{wall_ms:.2f} ms of a step, {cpu_ms:.2f} ms of a processor"
        print(f"A further bucket over {wire}: {costs}.")


if __name__ == "__main__":
    main()
