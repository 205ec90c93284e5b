"""Measure what one more bucket adds to a step: wall time, and processor time of a worker.

    python benchmarks/bucket_cost.py [--workers 2] [--elements 8388608] [--buckets 1 2 4 8 16 32]
        [--wire gloo tcp] [--json FILE]
    distlion netlab run --hosts 2 -- python benchmarks/bucket_cost.py --wire gloo tcp

Without a launcher it starts workers on this machine. Workers vote on the same parameters, cut into
more and more buckets; the cuts take turns, and so do the transports. Processor time is that of all
threads of a worker, the network library's included. A bucket's cost is the slope of the least
squares line through the medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run_conditions import read_conditions, read_tcp
from torch import nn

import distlion
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire

WARM_UP = 5


def build(arguments: argparse.Namespace) -> dict[tuple[int, str], distlion.DistributedLion]:
    """Build an optimizer for each number of buckets and transport."""
    most, n_elements = max(arguments.buckets), arguments.elements
    optimizers = {}
    for n_buckets, wire in itertools.product(arguments.buckets, arguments.wire):
        os.environ[WIRE_VARIABLE] = wire
        params = [nn.Parameter(torch.randn(n_elements // most)) for _ in range(most)]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizers[n_buckets, wire] = distlion.DistributedLion(
            params,
            1e-4,
            exchange=distlion.AllReduce(),
            bucket_elements=n_elements // n_buckets,
            replicas=distlion.Replicas(check_every=None),
        )
    return optimizers


def measure(arguments: argparse.Namespace) -> dict[str, list[tuple[int, float, float]]]:
    """Return (buckets, wall, processor) of each transport: medians in ms, the mean worker's."""
    optimizers = build(arguments)
    taken: dict[tuple[int, str], list[tuple[float, float]]] = {each: [] for each in optimizers}
    for turn in range(WARM_UP + arguments.turns):
        for each, optimizer in optimizers.items():
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            optimizer.step()
            took = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            if turn >= WARM_UP:
                taken[each].append(took)
    medians = [[statistics.median(each) for each in zip(*of, strict=True)] for of in taken.values()]
    mean_ms = 1e3 * torch.tensor(medians, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean_ms)
    found: dict[str, list[tuple[int, float, float]]] = {wire: [] for wire in arguments.wire}
    for (n_buckets, wire), (wall_ms, cpu_ms) in zip(taken, mean_ms.tolist(), strict=True):
        found[wire].append((n_buckets, wall_ms, cpu_ms))
    return found


def report(found: dict[str, list[tuple[int, float, float]]]) -> dict[str, list[float]]:
    """Print a table, and return the cost of a further bucket over each transport."""
    print("| buckets | wire | wall, ms | processor, ms |\n| ---: | --- | ---: | ---: |")
    for wire, rows in found.items():
        for n_buckets, wall_ms, cpu_ms in rows:
            print(f"| {n_buckets} | {wire} | {wall_ms:.2f} | {cpu_ms:.2f} |")
    print()
    slopes = {}
    for wire, rows in found.items():
        cuts, *columns = zip(*rows, strict=True)
        slopes[wire] = [statistics.linear_regression(cuts, each)[0] for each in columns]
        wall_ms, cpu_ms = slopes[wire]
        costs = f"{wall_ms:.2f} ms of a step, {cpu_ms:.2f} ms of a processor"
        print(f"A further bucket over {wire}: {costs}.")
    return slopes


def run(arguments: argparse.Namespace) -> None:
    """Measure as one of the workers; the first one reports."""
    conditions = read_conditions(
        **read_tcp(),
        workers=dist.get_world_size(),
        hosts=arguments.hosts,
        elements=arguments.elements,
        turns=arguments.turns,
    )
    found = measure(arguments)
    if dist.get_rank() == 0:
        slopes = report(found)
        if arguments.json:
            record = {"conditions": conditions, "steps_ms": found, "bucket_ms": slopes}
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def work(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """Be a worker on this machine."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=arguments.workers)
    run(arguments)


def main() -> None:
    """Print a table, and the cost of a bucket."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elements", type=int, default=8 * 1024 * 1024, help="parameters")
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=40, help="steps with each number of buckets")
    parser.add_argument("--wire", nargs="+", default=[choose_wire()], choices=["gloo", "tcp"])
    parser.add_argument("--json", type=Path, help="where the record goes")
    arguments = parser.parse_args()
    arguments.hosts = 1
    if "RANK" in os.environ:
        arguments.hosts = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        run(arguments)
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process keeps the store
    mp.spawn(work, (store.port, arguments), nprocs=arguments.workers)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
