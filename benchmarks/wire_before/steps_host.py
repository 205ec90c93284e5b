"""One host's part: steps of a model or of bare parameters, of several methods in turn.

    python steps_host.py FOLDER PLAN

PLAN is JSON. Runs in the environment of ``torchrun``, on a host of a network lab. It also runs with
the distlion of an earlier commit, so that it takes no more of the packages than both have. Writes
the median seconds of a step of each method, wall and processor time of this worker, to
FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distlion
from distlion_netlab import DeviceWorkload, GptWorkload
from distlion_netlab.lab_run import start_run
from distlion_netlab.sweep_worker import list_cores

WARM_UP = 3
Step = Callable[[], object]


def build_cut(n_elements: int, n_buckets: int) -> Step:
    """Build a step of bare parameters, which travel in so many buckets."""
    params = [nn.Parameter(torch.randn(n_elements // n_buckets)) for _ in range(n_buckets)]
    for param in params:
        param.grad = torch.randn_like(param)
    unchecked: dict[str, Any] = {"check_every": None}
    if hasattr(distlion, "Replicas"):
        unchecked = {"replicas": distlion.Replicas(check_every=None)}
    return distlion.DistributedLion(
        params,
        1e-4,
        exchange=distlion.AllReduce(),
        bucket_elements=n_elements // n_buckets,
        **unchecked,
    ).step


def build(plan: dict[str, Any], rank: int) -> dict[str, Step]:
    """Build the step of each method."""
    if "buckets" in plan:
        return {str(number): build_cut(plan["elements"], number) for number in plan["buckets"]}
    make: Any = {"device": DeviceWorkload, "gpt": GptWorkload}[plan["workload"]]
    workload = make(**plan["sizes"])
    return {name: start_run(name, workload, rank=rank).step for name in plan["methods"]}


def main() -> None:
    """Do steps, and write what they took."""
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, list_cores(rank, size))
    dist.init_process_group("gloo")
    steps = build(plan, rank)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for block in range(1 + plan["blocks"]):
        for name, step in steps.items():
            for _ in range(WARM_UP if block == 0 else 0):
                step()
            dist.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(plan["steps"]):
                step()
            took = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            if block > 0:
                taken[name].append(took)
    found = {
        name: [statistics.median(each) / plan["steps"] for each in zip(*of, strict=True)]
        for name, of in taken.items()
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stderr.flush()
    # A thread of Gloo may still hold a tensor, which can abort the interpreter's shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
