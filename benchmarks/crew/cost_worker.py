"""One worker of the cost part: python cost_worker.py DESCRIPTOR with|without PARAMETERS ENDPOINT.

It answers calls of its parent: ``("run", steps)`` with seconds of these steps and of their
``optimizer.step()``; ``("rest",)`` with the processor time of the process so far.
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


def run_steps(model: nn.Sequential, optimizer: Any, steps: int) -> tuple[float, float]:
    """Do training steps after a barrier; return their seconds, and those in ``step()``."""
    width = model[0].in_features
    inputs = torch.randn(
        BATCH_SIZE, int(width), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    dist.barrier()
    began_s, in_step_s = time.perf_counter(), 0.0
    for _ in range(steps):
        model(inputs).square().mean().backward()
        step_began_s = time.perf_counter()
        optimizer.step()
        in_step_s += time.perf_counter() - step_began_s
        optimizer.zero_grad()
    return time.perf_counter() - began_s, in_step_s


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


def main(descriptor: int, mode: str, n_parameters: int, endpoint: str, n_workers: int) -> None:
    torch.set_num_threads(1)
    model, calls = build_model(n_parameters), Connection(descriptor)
    if mode == "without":
        dist.init_process_group("gloo")
        optimizer = distlion.DistributedLion(model.named_parameters(), lr=LR)
        serve(calls, model, optimizer)
    else:
        crew = distlion.Crew(endpoint, min_workers=n_workers)
        serve(calls, model, crew.optimizer(model.named_parameters(), lr=LR))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
