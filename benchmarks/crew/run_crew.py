"""A worker under distlion's crew: python run_crew.py LOG ENDPOINT."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from step_log import StepLog
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


def main(file: Path, endpoint: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    model, log, pace = build_model(), StepLog(file), Pace()
    distlion.Lion([next(model.parameters())])  # imports what the first optimizer needs
    log.write_ready()
    with distlion.Crew(
        endpoint,
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
            compute_loss(model, step=step, place=crew.rank).backward()
            if optimizer.step():
                step = optimizer.committed_step
                log.write_commit(step=step, epoch=crew.epoch.number, params=model.parameters())
                if CHECKPOINTS is not None and step % SAVE_EVERY == 0:
                    distlion.save_checkpoint(CHECKPOINTS, model, optimizer, keep_last=1)
            else:
                log.write_failure(step + 1)
            optimizer.zero_grad()
            pace.wait()  # no wait after an epoch was formed: it would count as a pause


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
