"""Time a step of LocalSteps without a vote beside the inner optimizer's own step.

    torchrun --nproc-per-node 2 benchmarks/local_step_cost.py [--json FILE]

AdamW steps on given gradients, alone and inside LocalSteps, in turns of 20 steps; one thread for
each process. Printed and written: the median and quartiles of the ratios of neighboring turns, in
CPU time, which other programs of a shared machine disturb less. A step without a vote waits for
nobody. Then the same for the first step after a vote, which looks for writes to parameters, in
turns of one step.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import nn

import distlion

SIZES = {"0.1 M": (128, 6), "1 M": (256, 16), "25 M": (1024, 24)}
"""Width and number of square matrices; each has a bias."""
STEPS, TURNS, NEVER = 20, 41, 1_000_000


def build(width: int, layers: int) -> list[nn.Parameter]:
    """Build parameters with gradients."""
    shapes = [(width, width), (width,)] * layers
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def time_steps(step: Callable[[], object], n_steps: int) -> float:
    """Return this thread's CPU seconds for some steps; all processes begin together."""
    dist.barrier()
    began = time.thread_time()
    for _ in range(n_steps):
        step()
    return time.thread_time() - began


def measure(width: int, layers: int, *, is_first: bool) -> list[float]:
    """Return the ratio of each pair of turns; the other one begins in every second pair.

    Args:
        width: Of each matrix.
        layers: Their number.
        is_first: Whether a turn is the first step after a vote.
    """
    own = torch.optim.AdamW(build(width, layers), 1e-4)
    inner = torch.optim.AdamW(build(width, layers), 1e-4)
    local = distlion.LocalSteps(inner, every=NEVER)
    n_steps = 1 if is_first else STEPS
    time_steps(own.step, n_steps), time_steps(local.step, n_steps)
    ratios = []
    for turn in range(TURNS):
        if is_first:
            local.vote()
        if turn % 2:
            ours, theirs = time_steps(local.step, n_steps), time_steps(own.step, n_steps)
        else:
            theirs, ours = time_steps(own.step, n_steps), time_steps(local.step, n_steps)
        ratios.append(ours / theirs)
    return ratios


def main() -> None:
    """Measure all sizes; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the record goes")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, dict[str, dict[str, object]]] = {}
    for kind, is_first in {"without a vote": False, "the first after a vote": True}.items():
        found[kind] = {}
        for name, (width, layers) in SIZES.items():
            ratios = measure(width, layers, is_first=is_first)
            low, middle, high = (round(each, 4) for each in quantiles(ratios, n=4))
            n_steps = 1 if is_first else STEPS
            spread = {"quartiles": [low, high], "steps": n_steps, "turns": TURNS}
            found[kind][name] = {"median": middle, **spread}
            if dist.get_rank() == 0:
                print(f"a step {kind}, {name} parameters: {middle:.3f} ({low:.3f} to {high:.3f})")
    if dist.get_rank() == 0 and args.json:
        conditions = {
            "date": dt.date.today().isoformat(),
            "processes": dist.get_world_size(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
        args.json.write_text(
            json.dumps({"conditions": conditions, "ratios": found}, indent=1) + "\n"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
