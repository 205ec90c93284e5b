"""Processor time of a step on many small tensors, beside torch's fused AdamW in the same run.

    python benchmarks/host_time.py [--tensors 148] [--elements 64] [--turns 300] [--json FILE]
    TRITON_INTERPRET=1 PYTHONPATH=tests python benchmarks/host_time.py --pretend

The tensors are so small that nearly all of a step is Python and the launch of kernels: what a host
does for a GPU too. Optimizers take turns; medians, on one thread.

``--pretend`` steps on the pretended GPU of the tests, which is a CPU. Whatever torch and Triton do
there is left out of the time, and counted instead: so many operations of torch and so many launches
of kernels. On a GPU each of these takes the host some microseconds more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import distlion
from records import read_conditions

REFERENCE = "AdamW, fused"
CONTESTANTS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    REFERENCE: lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "Lion": lambda params: distlion.Lion(params, lr=1e-4),
    "DistributedLion, one worker": lambda params: distlion.DistributedLion(params, lr=1e-4),
}
OURS = list(CONTESTANTS)[2:]
WARM_UP = 30


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


class Outside:
    """Seconds spent in torch and in kernels, and how often they were called.

    Attributes:
        seconds: Processor seconds of this thread.
        operations: Calls of torch, attributes of tensors apart.
        launches: Launches of kernels.
    """

    def __init__(self) -> None:
        self.seconds, self.operations, self.launches = 0.0, 0, 0
        self._depth = 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call whose time is not ours."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began_s

        return outside

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time all that the pretended device does."""
        from distlion.kernels.gpu import backend
        from distlion.kernels.gpu import launch as launching
        from pretend_cuda import OnDevice

        function = self.timed(OnDevice.__torch_function__)
        launch = self.timed(backend.launch)

        def dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not self._depth and getattr(func, "__name__", "") not in ("__get__", "__set__"):
                self.operations += 1
            return function(func, types, args, kwargs)

        def launched(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            launch(*args, **kwargs)

        with (
            mock.patch.object(OnDevice, "__torch_function__", classmethod(dispatch)),
            mock.patch.object(backend, "launch", launched),
            mock.patch.object(launching, "launch", launched),
        ):
            yield


def measure_pretended(n_tensors: int, n_elements: int, turns: int) -> dict[str, dict[str, float]]:
    """Return medians of a step on the pretended device: own seconds, operations, launches."""
    from pretend_cuda import pretend_cuda

    steps: dict[str, list[tuple[float, int, int]]] = {name: [] for name in OURS}
    with pretend_cuda() as device:
        placed = {
            name: [device.place(torch.randn(n_elements)) for _ in range(n_tensors)] for name in OURS
        }
        optimizers = {name: build(name, tensors) for name, tensors in placed.items()}
        for turn in range(WARM_UP + turns):
            for name, optimizer in optimizers.items():
                outside = Outside()
                with outside.watched():
                    began_s = time.thread_time()
                    optimizer.step()
                    own_s = time.thread_time() - began_s - outside.seconds
                if turn >= WARM_UP:
                    steps[name].append((own_s, outside.operations, outside.launches))
    names = "own_s", "operations", "launches"
    return {
        name: dict(zip(names, map(statistics.median, zip(*each, strict=True)), strict=True))
        for name, each in steps.items()
    }


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
        part, found = "pretended", measure_pretended(*wanted)
        print("| optimizer | own ms a step | operations of torch | launches |")
        print("| --- | ---: | ---: | ---: |")
        for name, each in found.items():
            figures = f"{1e3 * each['own_s']:.3f} | {each['operations']:g} | {each['launches']:g}"
            print(f"| {name} | {figures} |")
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
