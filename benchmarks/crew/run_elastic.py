"""A worker under torchrun: python run_elastic.py LOG CHECKPOINT; each restart is a new process.

DDP with AdamW; rank 0 saves every few steps, and all resume from there.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from step_log import StepLog
from torch.nn.parallel import DistributedDataParallel
from training_load import LR, SAVE_EVERY, SIZE, Pace, build_model, compute_loss

FORMING_S = 15
"""How long workers wait for each other's interpreters."""


def number_epoch() -> int:
    """Return a number that all agree on, greater than in every earlier start."""
    number = torch.tensor([time.monotonic_ns() // 1_000_000])
    dist.broadcast(number, 0)
    return int(number)


def main(file: Path, checkpoint: Path) -> None:
    model, log, pace = build_model(), StepLog(file), Pace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    log.write_ready()
    dist.init_process_group("gloo", timeout=timedelta(seconds=FORMING_S))
    epoch, rank = number_epoch(), dist.get_rank()
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    group = dist.new_group(timeout=timedelta(seconds=SIZE.average_s))
    wrapped = DistributedDataParallel(model, process_group=group)
    while True:
        pace.wait()
        compute_loss(wrapped, step=step, place=rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.write_commit(step=step, epoch=epoch, params=model.parameters())
        if rank == 0 and step % SAVE_EVERY == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "step": step}, draft := checkpoint.with_suffix(".draft"))
            draft.replace(checkpoint)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)  # the destructor of a group may wait for peers that are silent
