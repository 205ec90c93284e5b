"""One rank of ``check_ranks``: train by each rule, and say what came of it as JSON.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import distlion
from distlion.kernels import Kernels
from distlion.votes import RULES

WATCHED_FROM = 10
"""The first steps compare replicas and gradients, which they read."""
STEP = "distlion.step"
COUNTED = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC"),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits": ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize"),
}
"""Calls of CUDA's runtime in a step, by what they are."""


def make_params(sizes: list[int], device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]


def make_grads(params: list[nn.Parameter], rank: int, step: int) -> list[torch.Tensor]:
    """Draw a gradient for every parameter that ranks and steps differ in."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(param.shape, generator=generator).to(param.device) for param in params]


def backward(params: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    """Let backward give every parameter its gradient; on a side stream of its device."""
    if params[0].device.type != "cuda":
        sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def watched(is_watched: bool):
    """Let torch raise where the host waits otherwise than for an event."""
    if is_watched:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if is_watched:
            torch.cuda.set_sync_debug_mode("default")


def count_calls(step: Callable[[], object]) -> dict[str, int]:
    """Count what one step asks of CUDA."""
    activities = list(torch.profiler.supported_activities())
    profile = torch.profiler.profile(activities=activities)
    with profile, torch.profiler.record_function(STEP):
        step()
    return count_events(profile.events())


def count_events(events: Iterable[FunctionEvent]) -> dict[str, int]:
    """Count the calls of each kind that begin in the step.

    The profiler itself waits for the device when it ends, and that wait is among the events.
    """
    events = list(events)
    # The device's timeline has a range of this name too.
    step = next(each for each in events if each.name == STEP and each.device_type == DeviceType.CPU)
    begin, end = step.time_range.start, step.time_range.end
    calls = Counter(each.name for each in events if begin <= each.time_range.start <= end)
    return {what: sum(calls[name] for name in names) for what, names in COUNTED.items()}


def make_optimizer(
    rule: str, options: list[str], params: list[nn.Parameter]
) -> distlion.DistributedLion | distlion.LocalSteps:
    shared = {
        "exchange": distlion.AllReduce(),
        "bucket_elements": max(param.numel() for param in params),
        "replicas": distlion.Replicas(check_every=None),
    }
    if "local" in options:
        # A power of two: its products are exact, so that device and host round alike.
        inner = torch.optim.SGD(params, lr=2.0**-7)
        return distlion.LocalSteps(inner, every=2, **shared)
    return distlion.DistributedLion(
        params,
        lr=1e-2,
        weight_decay=0.1,
        aggregation=RULES[rule].rule,
        overlap="overlap" in options,
        cautious="cautious" in options,
        weight=1 + 2 * dist.get_rank() if "weighted" in options else 1,
        **shared,
    )


def train(rule: str, options: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train by one rule; return what came of it, and what the last step asked of CUDA."""
    rank = dist.get_rank()
    # How often steps of another optimizer wait is its own affair.
    is_counted = args.device.startswith("cuda") and "local" not in options
    params = make_params(args.sizes, args.device)
    optimizer = make_optimizer(rule, options, params)
    calls = None
    for step in range(args.steps):
        is_watched = is_counted and step >= WATCHED_FROM
        is_last = step == args.steps - 1
        grads = make_grads(params, rank, step)  # copied from the host, which waits for it
        # With overlap, votes leave in here.
        with watched(is_watched and "overlap" in options):
            backward(params, grads)
        if is_last and is_counted:
            calls = count_calls(optimizer.step)
        else:
            with watched(is_watched):
                optimizer.step()
        optimizer.zero_grad()
    optimizer.verify_replicas()
    digests = Kernels().digests([param.detach().cpu() for param in params]).tolist()
    n_buckets = len(getattr(optimizer, "outer_optimizer", optimizer)._session.routing.buckets)
    return {"digests": digests, "buckets": n_buckets, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True, help="JSON: [[rule, option, ...], ...]")
    parser.add_argument("--device", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps([train(rule, options, args) for rule, *options in json.loads(args.cases)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
