"""Time a vote of LocalSteps beside a step of DistributedLion on the same parameters.

    torchrun --nproc-per-node 2 benchmarks/local_vote.py [--json FILE] [--sizes "1 M"] [--turns 21]
        [--device cuda]

A step of ``DistributedLion`` with ``MajorityVote`` encodes, exchanges, counts and commits; a vote
of ``LocalSteps`` does that with deltas, for each of its rules. Both take turns, one thread for each
process, and local steps between votes are not timed. Printed and written: the median and quartiles
of the ratios of neighboring turns, in CPU time of the calling thread, which other programs of a
shared machine disturb less, and in wall time, which has the network in it. The first vote of an
optimizer is timed apart, as a multiple of the median of its later ones, and so is the first plain
step. Before each local step some memory is used and freed, as a backward pass does: a process that
has never used as much pays a page fault for each 4 KiB. ``FeedbackVote`` belongs to
``DistributedLion``; its row is a step of that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from run_conditions import read_conditions
from torch import nn

import distlion

SIZES = {"1 M": 200, "8.4 M": 580}
"""Width of 25 square matrices; each has a bias."""
LAYERS, NEVER = 25, 1_000_000

Call = Callable[[], object]


def build(width: int) -> list[nn.Parameter]:
    """Build parameters with gradients, on torch's default device."""
    params = [nn.Parameter(torch.randn(shape)) for shape in [(width, width), (width,)] * LAYERS]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def build_plain(rule: distlion.Aggregation, width: int) -> tuple[Call, Call]:
    """Build what a step of DistributedLion needs: nothing before, and the step."""
    optimizer = distlion.DistributedLion(build(width), 1e-4, aggregation=rule)
    return lambda: None, optimizer.step


def build_local(width: int, **options: object) -> tuple[Call, Call]:
    """Build what a vote of LocalSteps needs: a local step before, and the vote."""
    params = build(width)
    inner = torch.optim.AdamW(params, 1e-4)
    optimizer = distlion.LocalSteps(inner, every=NEVER, **options)

    def step() -> None:
        _activations = [torch.zeros_like(param) for param in params * 3]
        optimizer.step()

    return step, optimizer.vote


ROWS: dict[str, Callable[[int], tuple[Call, Call]]] = {
    "ScaledVote": lambda width: build_local(width, aggregation=distlion.ScaledVote()),
    "ScaledVote, outer momentum": lambda width: build_local(
        width, aggregation=distlion.ScaledVote(), outer_momentum=0.9, nesterov=True
    ),
    "ResidualVote(1)": lambda width: build_local(width, aggregation=distlion.ResidualVote(1)),
    "ResidualVote(2)": lambda width: build_local(width, aggregation=distlion.ResidualVote(2)),
    "EstimateVote(1)": lambda width: build_local(width, aggregation=distlion.EstimateVote(1)),
    "EstimateVote(2)": lambda width: build_local(width, aggregation=distlion.EstimateVote(2)),
    "StochasticVote": lambda width: build_local(width, aggregation=distlion.StochasticVote()),
    "FeedbackVote(1), a plain step": lambda width: build_plain(distlion.FeedbackVote(1), width),
    "FeedbackVote(2), a plain step": lambda width: build_plain(distlion.FeedbackVote(2), width),
}


def wait_for_device() -> None:
    """Wait until the default device has done what it has to do."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def time_call(before: Call, call: Call) -> tuple[float, float]:
    """Return a call's seconds, CPU time of this thread and wall time; all begin together."""
    before()
    wait_for_device()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    wait_for_device()
    return time.thread_time() - cpu, time.perf_counter() - wall


def measure(row: str, width: int, turns: int) -> dict[str, object]:
    """Time a row's votes beside plain steps, in turns; begin with the first vote."""
    theirs = build_plain(distlion.MajorityVote(), width)
    first_step = time_call(*theirs)
    time_call(*theirs)
    ours = ROWS[row](width)
    first = time_call(*ours)
    time_call(*ours)
    pairs = []
    for turn in range(turns):
        if turn % 2:
            vote, step = time_call(*ours), time_call(*theirs)
        else:
            step, vote = time_call(*theirs), time_call(*ours)
        pairs.append((vote, step))
    found: dict[str, object] = {}
    for place, clock in enumerate(("cpu", "wall")):
        low, middle, high = quantiles([vote[place] / step[place] for vote, step in pairs], n=4)
        later = median(vote[place] for vote, _ in pairs)
        found[clock] = {
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "vote_ms": round(1e3 * later, 3),
            "step_ms": round(1e3 * (later_step := median(step[place] for _, step in pairs)), 3),
            "first_vote": round(first[place] / later, 3),
            "first_step": round(first_step[place] / later_step, 3),
        }
    return found


def main() -> None:
    """Measure all rows; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--turns", type=int, default=21, help="votes of each row")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of parameters")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.set_default_device(args.device)
    torch.manual_seed(dist.get_rank())
    conditions = read_conditions(processes=dist.get_world_size(), turns=args.turns)
    found: dict[str, dict[str, dict[str, object]]] = {}
    for size in args.sizes:
        found[size] = {}
        for row in args.rows:
            found[size][row] = result = measure(row, SIZES[size], args.turns)
            if dist.get_rank() == 0:
                print(f"{size:6} {row:30}", *(f"{key} {result[key]}" for key in result), flush=True)
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(
            json.dumps({"conditions": conditions, "votes": found}, indent=1) + "\n"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
