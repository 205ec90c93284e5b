"""A worker under torchft, as its README has it: python run_torchft.py LOG LIGHTHOUSE.

A replica group is one process, which keeps the group's store itself. Gradients are averaged by
``Manager.allreduce`` in one buffer: torchft 0.2.0's DistributedDataParallel ends in an assertion
where Gloo loses a peer. This runs with an interpreter that has torchft; distlion is not needed.
"""

from __future__ import annotations

import logging
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from step_log import StepLog
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo
from training_load import (
    ADDRESS,
    CHECKPOINTS,
    LR,
    MIN_WORKERS,
    SAVE_EVERY,
    SIZE,
    Pace,
    build_model,
    compute_loss,
)

FORMING_S = 30
"""How long a quorum may take; a worker that is left out of one waits for the next."""


def average_gradients(manager: Manager, model: torch.nn.Module) -> None:
    """Average over the quorum; an error is noted by the manager, which then does not commit."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    manager.allreduce(flat).wait()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def main(file: Path, lighthouse: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    socket.gethostname = lambda: ADDRESS  # torchft names it to those who fetch parameters
    model, log, pace = build_model(), StepLog(file), Pace()
    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    log.write_ready()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=SIZE.average_s)),
        min_replica_size=MIN_WORKERS,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        timeout=timedelta(seconds=SIZE.average_s),
        quorum_timeout=timedelta(seconds=FORMING_S),
        quorum_retries=3,
        rank=0,
        world_size=1,
        store_addr=ADDRESS,
        store_port=store.port,
        hostname=ADDRESS,
        lighthouse_addr=lighthouse,
        replica_id=file.stem,
    )
    optimizer = Optimizer(manager, inner)
    checkpoint = None if CHECKPOINTS is None else CHECKPOINTS / "checkpoint.pt"
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        load(saved)
        manager.load_state_dict(saved["manager"])
    while True:
        pace.wait()
        optimizer.zero_grad()
        place = hash(file.stem) % 997
        compute_loss(model, step=manager.current_step(), place=place).backward()
        average_gradients(manager, model)
        before = manager.batches_committed()
        optimizer.step()
        step = manager.current_step()
        if manager.batches_committed() > before:
            log.write_commit(step=step, epoch=manager._quorum_id, params=model.parameters())
            is_first = manager.participating_rank() == 0
            if checkpoint is not None and is_first and step % SAVE_EVERY == 0:
                states = {"model": model.state_dict(), "optim": inner.state_dict()}
                states["manager"] = manager.state_dict()
                torch.save(states, draft := checkpoint.with_suffix(".draft"))
                draft.replace(checkpoint)
        else:
            log.write_failure(step + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
