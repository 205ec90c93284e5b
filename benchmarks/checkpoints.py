"""How long a save and a load take, beside torch.save and DCP of the same bytes.

    python benchmarks/checkpoints.py [--params 100000000] [--workers 4] [--rounds 7] [--results DIR]

Four workers on this machine hold a model of fp32 parameters and a momentum each. In each round the
contestants take turns in a drawn order, since the disk is slower after some of them: ours (hashed,
on the disk when it returns), ours in the background (the time that it holds up the caller, and the
whole), torch.save of one file for each worker with and without fsync, and
torch.distributed.checkpoint with keys that keep every worker's momentum. Times are medians from
barrier to barrier, ratios medians of those of one round; memory is the most that a worker had
beyond what it had before.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import distlion

N_TENSORS = 50
NAMED = "torch.save, fsync"


class Stage:
    """One worker with a model and an optimizer."""

    def __init__(self, params: int, folder: Path) -> None:
        self.rank, self.folder = dist.get_rank(), folder
        torch.manual_seed(0)
        each = params // N_TENSORS
        self.model = nn.ParameterList([nn.Parameter(torch.randn(each)) for _ in range(N_TENSORS)])
        self.optimizer = distlion.DistributedLion(
            self.model.named_parameters(), replicas=distlion.Replicas(check_every=None)
        )
        for state in self.optimizer.state.values():
            state["exp_avg"].normal_()
        self.pending: Any = None

    def momenta(self) -> dict[str, torch.Tensor]:
        return {
            f"{self.rank}.{index}": state["exp_avg"]
            for index, state in enumerate(self.optimizer.state.values())
        }

    def save(self) -> None:
        distlion.save_checkpoint(self.folder / "ours", self.model, self.optimizer, keep_last=1)

    def begin(self) -> None:
        self.pending = distlion.save_checkpoint(
            self.folder / "ours", self.model, self.optimizer, keep_last=1, async_=True
        )

    def wait(self) -> None:
        self.pending.wait()

    def load(self) -> None:
        distlion.load_checkpoint(self.folder / "ours", self.model, self.optimizer)

    def torch_save(self, *, sync: bool) -> None:
        state = {"momenta": self.momenta()}
        if self.rank == 0:
            state["model"] = self.model.state_dict()
        path = self.folder / f"torch-{self.rank}.pt"
        with path.open("wb") as file:
            torch.save(state, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def torch_load(self) -> None:
        dist.barrier()
        torch.load(self.folder / f"torch-{self.rank}.pt", weights_only=True)
        torch.load(self.folder / "torch-0.pt", weights_only=True)

    def dcp_save(self) -> None:
        import torch.distributed.checkpoint as dcp

        folder = self.folder / "dcp"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        dcp.save({"model": self.model.state_dict(), **self.momenta()}, checkpoint_id=folder)


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def measure(stage: Stage, call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds from barrier to barrier, and the MiB that were used on the way."""
    if stage.rank == 0:
        os.sync()  # or whoever syncs next would write what the one before has left
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_kib()
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start, (peak_kib() - before) / 1024


def work(rank: int, world_size: int, store: str, arguments: argparse.Namespace, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    stage = Stage(arguments.params, Path(arguments.folder))
    contestants: list[dict[str, Callable[[], Any]]] = [
        {"save_checkpoint": stage.save},
        {
            "save_checkpoint, async: held up": stage.begin,
            "save_checkpoint, async: until written": stage.wait,
        },
        {"load_checkpoint": stage.load},
        {"torch.save": lambda: stage.torch_save(sync=False)},
        {NAMED: lambda: stage.torch_save(sync=True)},
        {"torch.load": stage.torch_load},
        {"DCP save": stage.dcp_save},
    ]
    names = [name for each in contestants for name in each]
    every = []
    for number in range(arguments.rounds + 1):
        turns = (
            random.Random(number).sample(contestants, len(contestants)) if number else contestants
        )
        every.append({name: measure(stage, call) for each in turns for name, call in each.items()})
        if rank == 0:
            print(f"round {number} of {arguments.rounds}", flush=True)
    rounds = every[1:]  # the first warms up: groups and files are made, modules imported
    # Later ones use what the allocator has kept.
    peaks = {name: max(each[name][1] for each in every) for name in names}
    everybody: list[Any] = [torch.zeros(len(peaks)) for _ in range(world_size)]
    dist.all_gather(everybody, torch.tensor([*peaks.values()]))
    if rank == 0:
        highest = torch.stack(everybody).max(0).values.tolist()
        rows = {
            name: {
                "seconds": statistics.median(each[name][0] for each in rounds),
                "ratio": statistics.median(each[name][0] / each[NAMED][0] for each in rounds),
                "MiB": highest[index],
            }
            for index, name in enumerate(names)
        }
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def format_table(record: dict[str, Any]) -> str:
    conditions = "\n".join(f"- {key}: {value}" for key, value in record["conditions"].items())
    lines = [
        f"| {name} | {row['seconds']:.2f} | {row['ratio']:.2f} | {row['MiB']:.0f} |"
        for name, row in record["rows"].items()
    ]
    head = f"|  | seconds | / {NAMED} | peak MiB of a worker |\n| --- | ---: | ---: | ---: |\n"
    title = (
        "# Checkpoints\n\nMade by `python benchmarks/checkpoints.py` from `checkpoints.json`.\n\n"
    )
    return f"{title}{conditions}\n\n{head}" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where files go; default: a temporary folder")
    parser.add_argument(
        "--results", type=Path, help="folder of checkpoints.json and checkpoints.md"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or temporary
        out = f"{temporary}/rows.json"
        load_before = os.getloadavg()[0]
        mp.spawn(
            work,
            args=(arguments.workers, f"{temporary}/store", arguments, out),
            nprocs=arguments.workers,
        )
        n_bytes = 4 * arguments.params * (arguments.workers + 1)
        record = {
            "conditions": {
                "date": dt.date.today().isoformat(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "distlion": version("distlion"),
                "workers": arguments.workers,
                "params": arguments.params,
                "bytes saved": n_bytes,
                "rounds": arguments.rounds,
                "load average before": round(load_before, 2),
                "load average after": round(os.getloadavg()[0], 2),
            },
            "rows": json.loads(Path(out).read_text()),
        }
    if arguments.results is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / "checkpoints.json").write_text(json.dumps(record, indent=1) + "\n")
        (arguments.results / "checkpoints.md").write_text(format_table(record))
    print(format_table(record))


if __name__ == "__main__":
    main()
