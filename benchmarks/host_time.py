"""Processor time of a step on many small tensors, beside torch's fused AdamW in the same run.

    python benchmarks/host_time.py [--tensors 148] [--elements 64] [--turns 300] [--json FILE]
    TRITON_INTERPRET=1 PYTHONPATH=tests python benchmarks/host_time.py --pretend

The tensors are so small that nearly all of a step is Python and the launch of kernels: what a host
does for a GPU too. Optimizers take turns; medians, on one thread.

``--pretend`` steps on the pretended GPU of the tests, which is a CPU and too slow to be timed. It
counts: calls of distlion's Python functions in a step, there and on the CPU, launches of kernels,
and what made the host wait. So the time on the CPU tells of the host's time on a GPU, without what
a launch takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from run_conditions import read_conditions
from torch import Tensor, nn

import distlion

REFERENCE = "AdamW, fused"
CONTESTANTS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    REFERENCE: lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "Lion": lambda params: distlion.Lion(params, lr=1e-4),
    "DistributedLion, one worker": lambda params: distlion.DistributedLion(params, lr=1e-4),
}
OURS = list(CONTESTANTS)[2:]
WARM_UP, FEW = 30, 3
SOURCES = str(Path(distlion.__file__).parent)


def build(name: str, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Build an optimizer of parameters with gradients."""
    params = [nn.Parameter(tensor) for tensor in tensors]
    for param in params:
        param.grad = torch.ones_like(param)
    return CONTESTANTS[name](params)


def measure(n_tensors: int, n_elements: int, turns: int) -> dict[str, float]:
    """Return the median processor seconds of a step of each optimizer."""
    optimizers = {
        name: build(name, [torch.randn(n_elements) for _ in range(n_tensors)])
        for name in CONTESTANTS
    }
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(WARM_UP + turns):
        for name, optimizer in optimizers.items():
            began_s = time.thread_time()
            optimizer.step()
            if turn >= WARM_UP:
                seconds[name].append(time.thread_time() - began_s)
    return {name: statistics.median(each) for name, each in seconds.items()}


class Calls:
    """Calls of distlion's Python functions while it is entered, interpreted kernels apart.

    Args:
        device: The pretended device; None for none.
    """

    def __init__(self, device: Any = None) -> None:
        self.number, self._device = 0, device

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        is_kernel = self._device is not None and self._device.is_quiet
        if event == "call" and not is_kernel and SOURCES in frame.f_code.co_filename:
            self.number += 1

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def count_pretended(n_tensors: int, n_elements: int) -> dict[str, dict[str, int]]:
    """Count what a step does on the pretended device, and its calls on the CPU."""
    from pretend_cuda import pretend_cuda

    drawn = torch.randn(n_tensors, n_elements)
    found = {}
    for name in OURS:
        on_cpu = build(name, [row.clone() for row in drawn])
        calls_on_cpu = count_calls(on_cpu)
        with pretend_cuda() as device:
            optimizer = build(name, [device.place(row) for row in drawn])
            calls = count_calls(optimizer, device)
            found[name] = {
                "calls": calls,
                "calls_on_cpu": calls_on_cpu,
                "launches": len(device.launches),
                "waits": len(device.waits),
            }
    return found


def count_calls(optimizer: torch.optim.Optimizer, device: Any = None) -> int:
    """Count the calls of the last of some steps, in which alone the device is watched."""
    for _ in range(FEW):
        optimizer.step()
    if device is not None:
        device.forget()
    with Calls(device) as calls:
        optimizer.step()
    return calls.number


def main() -> None:
    """Print a table, and keep a record if asked to; other parts of a record stay."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, default=148, help="number of tensors, as in GPT-2")
    parser.add_argument("--elements", type=int, default=64, help="elements of each")
    parser.add_argument("--turns", type=int, default=300, help="steps of each optimizer")
    parser.add_argument("--pretend", action="store_true", help="on a GPU that isn't there")
    parser.add_argument("--json", type=Path, help="where the record goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = arguments.tensors, arguments.elements, arguments.turns
    conditions = read_conditions(
        **dict(zip(("tensors", "elements", "turns"), wanted, strict=True)), threads=1
    )
    if arguments.pretend:
        part, found = "pretended", count_pretended(arguments.tensors, arguments.elements)
        print("| optimizer | calls in a step | on the CPU | launches | waits |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, each in found.items():
            print("|", " | ".join([name, *map(str, each.values())]), "|")
    else:
        part, seconds = "processor_s", measure(*wanted)
        print("| optimizer | ms a step | of fused AdamW |\n| --- | ---: | ---: |")
        for name, each_s in seconds.items():
            print(f"| {name} | {1e3 * each_s:.3f} | {each_s / seconds[REFERENCE]:.2f} |")
        found = seconds
    if arguments.json:
        file: Path = arguments.json
        record = json.loads(file.read_text()) if file.exists() else {}
        record[part] = {"conditions": conditions, "found": found}
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
