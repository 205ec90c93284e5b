"""What comparing the replicas costs: digests of all parameters, against steps.

    python benchmarks/replicas.py [--params 16777216] [--workers 2] [--rounds 15] [--results DIR]

Workers on this machine take turns at a step of votes and a comparison. The share is that of one
comparison in the 1,000 steps from one to the next by default, of steps without any forward and
backward pass, which only make it smaller.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import distlion

CHECK_EVERY = 1000


def measure(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def work(rank: int, world_size: int, store: str, params: int, rounds: int, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    param = torch.nn.Parameter(torch.zeros(params))
    optimizer = distlion.DistributedLion([param], replicas=distlion.Replicas(check_every=None))
    param.grad = torch.randn(params, generator=torch.Generator().manual_seed(rank))
    steps, checks = [], []
    for number in range(rounds + 2):
        step, check = measure(optimizer.step), measure(optimizer.verify_replicas)
        if number >= 2:
            steps.append(step)
            checks.append(check)
    if rank == 0:
        shares = [check / (CHECK_EVERY * step) for step, check in zip(steps, checks, strict=True)]
        rows = {
            "step, ms": 1e3 * statistics.median(steps),
            "comparison, ms": 1e3 * statistics.median(checks),
            f"share of the time at check_every={CHECK_EVERY}": statistics.median(shares),
        }
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--params", type=int, default=1 << 24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, help="folder of replicas.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, store = f"{folder}/rows.json", f"{folder}/store"
        rest = (arguments.workers, store, arguments.params, arguments.rounds, out)
        mp.spawn(work, args=rest, nprocs=arguments.workers)
        record = {
            "conditions": {
                "date": dt.date.today().isoformat(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "workers": arguments.workers,
                "params": arguments.params,
                "rounds": arguments.rounds,
                "load average after": round(os.getloadavg()[0], 2),
            },
            "rows": json.loads(Path(out).read_text()),
        }
    if arguments.results is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / "replicas.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, value in record["rows"].items():
        print(f"{name:45} {value:.3g}")


if __name__ == "__main__":
    main()
