"""Compare the transports: rounds of votes, exchanges of some size, and the links that they need.

    python benchmarks/wire_rounds.py [--workers 2] [--bytes 64 65536 1000000 4000000] [--turns 20]
    distlion netlab run --hosts 4 --rate 100mbit -- python benchmarks/wire_rounds.py

Without a launcher it starts workers on this machine. Transports take turns. A round is an
all-to-all and then an all-gather, as a step of ``AllReduce`` makes them, of ``--bytes`` over the
number of workers each. Processor time is that of all threads of a worker. With ``--late`` the last
worker begins each round that many seconds after the others, and the times count from there on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run_conditions import read_conditions, read_tcp

from distlion.wire.gloo import Gloo
from distlion.wire.groups import own_group
from distlion.wire.tcp import link_over

WIRES = ("gloo", "tcp")
WARM_UP = 2


def round_of(link: Gloo, n_bytes: int) -> Callable[[], None]:
    """Return a function that exchanges votes and replies."""
    n = link.n_members
    size = max(1, n_bytes // n)
    votes, heard, gathered = (torch.zeros(n, size, dtype=torch.uint8) for _ in range(3))
    reply = torch.zeros(size, dtype=torch.uint8)

    def exchange() -> None:
        link.all_to_all(heard, votes, step=0).wait()
        link.all_gather(gathered, reply, step=0).wait()

    return exchange


def measure(exchange: Callable[[], None], late_s: float) -> tuple[float, float]:
    """Return the seconds of the slowest worker, and the mean worker's of its processor."""
    dist.barrier()
    began_cpu_s = time.process_time()
    if late_s and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late_s)
    began_s = time.perf_counter()
    exchange()
    took_s = time.perf_counter() - began_s
    if late_s and dist.get_rank() != dist.get_world_size() - 1:
        took_s -= late_s
    cpu_s = time.process_time() - began_cpu_s
    most = torch.tensor([took_s], dtype=torch.float64)
    mean = torch.tensor([cpu_s], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return float(most), float(mean) / dist.get_world_size()


def report(name: str, found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Print the medians of one line, on the first rank, and return them in ms."""
    wall_ms, cpu_ms = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
    if dist.get_rank() == 0:
        print(f"| {name} | {wall_ms:.2f} | {cpu_ms:.3f} |", flush=True)
    return wall_ms, cpu_ms


def compare(arguments: argparse.Namespace) -> None:
    """Measure all of it as one of the workers."""
    conditions = read_conditions(
        **read_tcp(),
        workers=dist.get_world_size(),
        turns=arguments.turns,
        link=arguments.link,
    )
    medians_ms: dict[str, dict[str, tuple[float, float]]] = {}
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        print("| what | wall, ms | processor, ms |\n| --- | ---: | ---: |")
    kept, links = [], {}
    made: dict[str, list[tuple[float, float]]] = {wire: [] for wire in WIRES}
    for number, wire in itertools.product(range(arguments.links), WIRES):

        def make(wire: str = wire, number: int = number) -> None:
            name = f"{wire} {number}"
            kept.append(own_group(group, name=name, timeout_s=60, wire=wire))

        made[wire].append(measure(make, 0))
        links[wire] = link_over(kept[-1], timeout_s=60)
    for wire in WIRES:
        report(f"links over {wire}", made[wire][1:])
    for n_bytes in arguments.bytes:
        rounds = {wire: round_of(links[wire], n_bytes) for wire in WIRES}
        found: dict[str, list[tuple[float, float]]] = {wire: [] for wire in WIRES}
        for turn, wire in itertools.product(range(WARM_UP + arguments.turns), WIRES):
            seen = measure(rounds[wire], arguments.late)
            if turn >= WARM_UP:
                found[wire].append(seen)
        medians_ms[str(n_bytes)] = {
            wire: report(f"{n_bytes:,} B over {wire}", found[wire]) for wire in WIRES
        }
    if dist.get_rank() == 0 and arguments.json:
        record = {"conditions": conditions, "wall_and_processor_ms": medians_ms}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def work(rank: int, port: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.workers
    )
    compare(arguments)
    dist.barrier()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 65536, 1_000_000, 4_000_000])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--links", type=int, default=6, help="groups to make, the first for warmth")
    parser.add_argument("--late", type=float, default=0.0, help="seconds; see above")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--link", default="", help="the link in words, for the record")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        compare(arguments)
        dist.barrier()
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process keeps the store
    mp.spawn(work, (store.port, arguments), nprocs=arguments.workers)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
