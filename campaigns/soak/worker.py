"""What each host of a soak runs: train, save now and then, go on from the latest checkpoint."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import distlion

SAVE_EVERY = 10
# A busy machine lets a worker wait for seconds, in which nobody has failed.
STEP_TIMEOUT_S = 6.0


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main(folder: Path, last_step: int) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64)
    )
    # What torch imports for the first optimizer takes longer still; the timeouts begin after it.
    distlion.Lion([torch.nn.Parameter(torch.zeros(1))])
    dist.barrier()
    optimizer = distlion.DistributedLion(
        model.named_parameters(),
        lr=1e-3,
        weight_decay=0.1,
        momentum_sync=distlion.MomentumSync(every=4),
        # Saves are as short as steps here: whoever is stopped in one is found as soon.
        timeouts=distlion.Timeouts(init_s=STEP_TIMEOUT_S, step_s=STEP_TIMEOUT_S),
        replicas=distlion.Replicas(check_every=10),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    if (folder / "latest").exists():
        distlion.load_checkpoint(folder, model, optimizer, schedule)
    print(f"resumed {optimizer.committed_step}", flush=True)
    for step in range(optimizer.committed_step, last_step):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % SAVE_EVERY == 0:
            distlion.save_checkpoint(folder, model, optimizer, schedule, keep_last=2)
        print(f"step {step + 1}", flush=True)
    optimizer.verify_replicas()
    momenta = [state["exp_avg"] for state in optimizer.state.values()]
    print(f"digest {digest([*model.parameters()])} {digest(momenta)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
