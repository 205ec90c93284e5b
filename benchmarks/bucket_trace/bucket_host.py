"""One host's part in a trace: steps with one bucket, and the instants of each on this rank.

    python bucket_host.py FOLDER N_ELEMENTS STEPS DEVICE

Runs in the environment of ``torchrun``, on a host of a network lab. It also runs with the distlion
of an earlier commit, so that it takes no more of the package than both have. Nothing in the
package is there for it: it wraps the functions that a step calls.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bucket_parts import INSTANTS
from packets import Tap, find_arrivals
from torch import nn

import distlion
from distlion.step.bucket import Bucket
from distlion.votes.bucket_vote import BucketCount, BucketVote
from distlion.wire import all_reduce
from distlion.wire.gloo import GlooTransfer

WARM_UP = 12
START_IN_NS = 50_000_000
# Of own sockets: the head of a message. Of Gloo: that a receiver is ready, and the head; a sender
# that has come first announces itself too, in 48 bytes, less than the last packet of a chunk has.
HEAD_BYTES = {"tcp": 16, "gloo": 2 * 48}
_TRACED: tuple[tuple[Any, str], ...] = (
    (BucketVote, "encode"),
    (all_reduce, "write_chunks"),
    (GlooTransfer, "__init__"),
    (GlooTransfer, "wait"),
    (all_reduce, "read_chunks"),
    (BucketCount, "reduce"),
    (all_reduce, "write_chunk"),
    (Bucket, "commit"),
)
_ORDER = (
    *("encode", "write_chunks", "__init__", "wait", "read_chunks"),
    *("reduce", "write_chunk", "__init__", "wait", "read_chunks", "commit"),
)


class Instants:
    """The ends of the functions that a step calls, and the sizes of its chunks.

    Args:
        wait_for_device: Function that waits for what the device has to do, at the commit's end.
    """

    def __init__(self, wait_for_device: Callable[[], None]) -> None:
        self._wait_for_device = wait_for_device
        self.ends: list[tuple[str, int]] = []
        self.chunk_bytes: dict[str, int] = {}
        for owner, name in _TRACED:
            setattr(owner, name, self._note(getattr(owner, name), name))

    def _note(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if name == "commit":
                self._wait_for_device()
            self.ends.append((name, time.perf_counter_ns()))
            if name.startswith("write_chunk"):  # (kernels, out, ...)
                self.chunk_bytes[name] = args[1].shape[-1]
            return result

        return noted

    def take(self, arrivals: list[int]) -> list[int]:
        """Return the instants between a step's begin and its end, with the arrivals in place.

        Raises:
            RuntimeError: The step had other parts.
        """
        names, moments = zip(*self.ends, strict=True)
        if names != _ORDER:
            raise RuntimeError(f"a step was {names}; expected {_ORDER}")
        self.ends.clear()
        votes, replies = arrivals
        return [*moments[:3], votes, *moments[3:8], replies, *moments[8:]]


def wait_for_start() -> None:
    """Wait for a moment that rank 0 sets: all ranks of a machine have the same clock."""
    start_ns = torch.tensor([time.perf_counter_ns() + START_IN_NS])
    dist.broadcast(start_ns, 0)
    time.sleep(max(0, int(start_ns) - time.perf_counter_ns()) / 1e9)


def trace_steps(n_elements: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Step, and return the instants of each step."""
    param = nn.Parameter(torch.randn(n_elements, device=device))
    param.grad = torch.randn_like(param)
    optimizer = distlion.DistributedLion(
        [param],
        1e-4,
        aggregation=distlion.MajorityVote(),
        exchange=distlion.AllReduce(),
        bucket_elements=2 * n_elements,
    )
    on_gpu = device.type == "cuda"
    instants = Instants(torch.cuda.synchronize if on_gpu else lambda: None)
    tap, traced = Tap(os.environ["GLOO_SOCKET_IFNAME"]), []
    for turn in range(WARM_UP + steps):
        tap.drain()
        instants.ends.clear()
        dist.barrier()  # nobody's votes come before all have drained
        wait_for_start()
        begun_ns = time.perf_counter_ns()
        optimizer.step()
        ended_ns = time.perf_counter_ns()
        if turn < WARM_UP:
            continue
        votes, replies = (instants.chunk_bytes[name] for name in ("write_chunks", "write_chunk"))
        head = HEAD_BYTES[os.environ["DISTLION_WIRE"]]
        arrivals = find_arrivals(tap.drain(), [head + votes, 2 * head + votes + replies])
        traced.append([begun_ns, *instants.take(arrivals), ended_ns])
    assert all(len(moments) == len(INSTANTS) for moments in traced)
    return {"steps": traced, "vote_bytes": votes, "reply_bytes": replies}


def main() -> None:
    folder, n_elements, steps, device = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    if world_size <= len(cores):  # a core of its own, if there are enough
        os.sched_setaffinity(0, cores[rank::world_size])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = trace_steps(int(n_elements), int(steps), torch.device(device))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stderr.flush()
    # A thread of Gloo may still hold a tensor, which can abort the interpreter's shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
