"""Processor time of a step on many small tensors, beside torch's fused AdamW in the same run.

    python benchmarks/host_time.py [--tensors 148] [--elements 64] [--turns 300]

The tensors are so small that nearly all of a step is Python and the launch of kernels: what a host
does for a GPU too. Optimizers take turns; medians, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import distlion

REFERENCE = "AdamW, fused"
CONTESTANTS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    REFERENCE: lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "Lion": lambda params: distlion.Lion(params, lr=1e-4),
    "DistributedLion, one worker": lambda params: distlion.DistributedLion(params, lr=1e-4),
}
WARM_UP = 30


def measure(n_tensors: int, n_elements: int, turns: int) -> dict[str, float]:
    """Return the median processor seconds of a step of each optimizer."""
    optimizers = {}
    for name, make in CONTESTANTS.items():
        params = [nn.Parameter(torch.randn(n_elements)) for _ in range(n_tensors)]
        for param in params:
            param.grad = torch.randn(n_elements)
        optimizers[name] = make(params)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(WARM_UP + turns):
        for name, optimizer in optimizers.items():
            began_s = time.thread_time()
            optimizer.step()
            if turn >= WARM_UP:
                seconds[name].append(time.thread_time() - began_s)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, default=148, help="number of tensors, as in GPT-2")
    parser.add_argument("--elements", type=int, default=64, help="elements of each")
    parser.add_argument("--turns", type=int, default=300, help="steps of each optimizer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.tensors, arguments.elements, arguments.turns)
    print("| optimizer | ms a step | of fused AdamW |\n| --- | ---: | ---: |")
    for name, each_s in found.items():
        print(f"| {name} | {1e3 * each_s:.3f} | {each_s / found[REFERENCE]:.2f} |")


if __name__ == "__main__":
    main()
