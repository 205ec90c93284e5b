"""A worker under distlion's crew: python run_crew.py LOG ENDPOINT.

Under torchrun it is a process of a machine whose processes share one replica by FSDP2; the first
one writes the log.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from step_log import StepLog
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training_load import (
    CHECKPOINTS,
    HEARTBEAT_S,
    LR,
    MAX_WORKERS,
    MIN_WORKERS,
    RETRIES,
    SAVE_EVERY,
    SIZE,
    Pace,
    build_model,
    compute_loss,
)

import distlion

MACHINE_S = 120


def shard(model: nn.Sequential) -> DeviceMesh:
    """Shard a network over the processes of this machine, and return their mesh."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=MACHINE_S))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mesh


def take_own(param: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a parameter."""
    return param.to_local() if isinstance(param, DTensor) else param


def main(file: Path, endpoint: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    model = build_model()
    distlion.Lion([next(model.parameters())])  # imports what the first optimizer needs
    mesh = shard(model) if "LOCAL_RANK" in os.environ else None
    log = StepLog(file if os.environ.get("LOCAL_RANK", "0") == "0" else Path(os.devnull))
    pace = Pace()
    log.write_ready()
    with distlion.Crew(
        endpoint,
        member=mesh,
        min_workers=MIN_WORKERS,
        max_workers=MAX_WORKERS,
        wait_timeout_s=120,
        silence_s=HEARTBEAT_S,
    ) as crew:
        optimizer = crew.optimizer(
            model.named_parameters(),
            lr=LR,
            timeouts=distlion.Timeouts(step_s=SIZE.silence_s),
            retry=RETRIES,
        )
        has_saved = CHECKPOINTS is not None and (CHECKPOINTS / "latest").exists()
        if has_saved and optimizer.committed_step == 0:
            distlion.load_checkpoint(CHECKPOINTS, model, optimizer, on_world_change="mean")
        while True:
            if crew.admit():
                continue
            step = optimizer.committed_step
            place = crew.rank * crew.n_lanes + crew.lane
            compute_loss(model, step=step, place=place).backward()
            if optimizer.step():
                step = optimizer.committed_step
                params = map(take_own, model.parameters())
                log.write_commit(step=step, epoch=crew.epoch.number, params=params)
                if CHECKPOINTS is not None and step % SAVE_EVERY == 0:
                    distlion.save_checkpoint(CHECKPOINTS, model, optimizer, keep_last=1)
            else:
                log.write_failure(step + 1)
            optimizer.zero_grad()
            pace.wait()  # no wait after an epoch was formed: it would count as a pause


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
