"""One worker of the cost part: python cost_worker.py DESCRIPTOR PARAMETERS ENDPOINT N MODE.

MODE is "with", for the optimizer of a crew, or "without", for one in a process group of
``torch.distributed``. It answers calls of its parent: ``("run", steps)`` with what steps took;
``("rest",)`` with the processor time of the process so far.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distlion

DEPTH, BATCH_SIZE, LR = 4, 8, 1e-4


def build_model(n_parameters: int) -> nn.Sequential:
    """Build a network of square layers of about so many parameters."""
    torch.manual_seed(0)
    width = int((n_parameters / DEPTH) ** 0.5)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def run_steps(
    model: nn.Sequential, optimizer: Any, steps: int
) -> tuple[list[float], list[float], float]:
    """Do training steps after a barrier.

    Returns:
        Seconds of each step, of each ``step()`` of the optimizer, and processor time of all.
    """
    width = model[0].in_features
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH_SIZE, int(width), generator=generator)
    dist.barrier()
    whole, alone, cpu_began_s = [], [], time.process_time()
    for _ in range(steps):
        began_s = time.perf_counter()
        model(inputs).square().mean().backward()
        step_began_s = time.perf_counter()
        optimizer.step()
        alone.append(time.perf_counter() - step_began_s)
        optimizer.zero_grad()
        whole.append(time.perf_counter() - began_s)
    return whole, alone, time.process_time() - cpu_began_s


def serve(calls: Connection, model: nn.Sequential, optimizer: Any) -> None:
    """Answer until the parent has closed its end."""
    calls.send(sum(param.numel() for param in model.parameters()))
    while True:
        try:
            verb, *arguments = calls.recv()
        except EOFError:
            return
        if verb == "run":
            calls.send(run_steps(model, optimizer, *arguments))
        else:
            calls.send(time.process_time())


def main(descriptor: int, n_parameters: int, endpoint: str, n_workers: int, mode: str) -> None:
    torch.set_num_threads(1)
    model, calls = build_model(n_parameters), Connection(descriptor)
    if mode == "with":
        crew = distlion.Crew(endpoint, min_workers=n_workers)
        serve(calls, model, crew.optimizer(model.named_parameters(), lr=LR))
    else:
        dist.init_process_group("gloo")
        serve(calls, model, distlion.DistributedLion(model.named_parameters(), lr=LR))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
