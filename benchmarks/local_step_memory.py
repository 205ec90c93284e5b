"""Measure the memory of LocalSteps: what a worker keeps, and how much more a vote takes.

    torchrun --nproc-per-node 2 benchmarks/local_step_memory.py [--json FILE]

Resident memory of one of two processes on CPUs, in bytes per parameter beside parameters, gradients
and inner optimizer: what stays after a vote, and the highest point of the vote above that. Needs
Linux. Once with 24 tensors of equal size, once with a single one.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import gc
import json
import platform
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import distlion

N_ELEMENTS = 12_000_000
TENSORS = (24, 1)
CASES: dict[str, dict[str, object]] = {
    "ScaledVote": {"aggregation": distlion.ScaledVote()},
    "ScaledVote, outer momentum": {
        "aggregation": distlion.ScaledVote(),
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "nesterov": True,
    },
    "StochasticVote": {"aggregation": distlion.StochasticVote()},
    "ResidualVote(1)": {"aggregation": distlion.ResidualVote(1)},
    "ResidualVote(2)": {"aggregation": distlion.ResidualVote(2)},
    "EstimateVote(1)": {"aggregation": distlion.EstimateVote(1)},
    "EstimateVote(2)": {"aggregation": distlion.EstimateVote(2)},
}
_MMAP_THRESHOLD = -3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"


def read_bytes(key: str) -> int:
    """Read the process's resident memory, VmRSS now or VmHWM at the highest, in bytes."""
    line = next(each for each in _STATUS.read_text().splitlines() if each.startswith(key))
    return int(line.split()[1]) * 1024


def measure(n_tensors: int, options: dict[str, object]) -> tuple[float, float]:
    """Return bytes per parameter that are kept, and further ones during the second vote."""
    params = [nn.Parameter(torch.ones(N_ELEMENTS // n_tensors)) for _ in range(n_tensors)]
    gc.collect()
    before = read_bytes("VmRSS")
    inner = torch.optim.SGD(params, lr=0.1)
    optimizer = distlion.LocalSteps(
        inner,
        every=10**6,
        exchange=distlion.AllReduce(),
        replicas=distlion.Replicas(check_every=None),
        **options,  # type: ignore[arg-type]
    )
    peak = steady = kept = 0
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        for param in params:
            param.grad = None
        gc.collect()
        dist.barrier()
        steady = read_bytes("VmRSS")
        _CLEAR.write_text(_CLEAR_PEAK)
        optimizer.vote()
        peak, kept = read_bytes("VmHWM"), read_bytes("VmRSS")
    return (kept - before) / N_ELEMENTS, (peak - steady) / N_ELEMENTS


def main() -> None:
    """Measure all cases; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the record goes")
    args = parser.parse_args()
    # Large blocks return to the system as soon as they are free.
    ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 1 << 16)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    measure(1, {})  # what the first use of a library takes does not count
    found: dict[str, dict[str, list[float]]] = {}
    for n_tensors in TENSORS:
        found[str(n_tensors)] = {}
        for name, options in CASES.items():
            kept, more = measure(n_tensors, options)
            found[str(n_tensors)][name] = [round(kept, 1), round(more, 1)]
            if dist.get_rank() == 0:
                print(
                    f"{n_tensors:2} tensors, {name}: {kept:.1f} kept, {more:.1f} more", flush=True
                )
    if dist.get_rank() == 0 and args.json:
        conditions = {
            "date": dt.date.today().isoformat(),
            "processes": dist.get_world_size(),
            "elements": N_ELEMENTS,
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
        record = {"conditions": conditions, "bytes_per_parameter": found}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
