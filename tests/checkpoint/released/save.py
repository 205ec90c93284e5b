"""Save small states with the version of distlion that is installed, for tests of later versions.

    python tests/checkpoint/released/save.py tests/checkpoint/released/VERSION

Run it with a release. Two workers train for three steps on gradients that are drawn from a seed.
Then the folder holds their checkpoints, a state of each optimizer by itself, and what both must
load as.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import distlion

STEPS = 3


def make_model() -> nn.Linear:
    """Return a model, equal on all workers."""
    model, generator = nn.Linear(3, 5), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def set_grads(model: nn.Module, rank: int, step: int) -> None:
    """Draw a worker's gradients of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def make_local(model: nn.Module) -> distlion.LocalSteps:
    """Return local steps of AdamW with an outer momentum."""
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return distlion.LocalSteps(inner, every=2, outer_momentum=0.5)


def list_tensors(optimizer: Any) -> list[torch.Tensor]:
    """List the state's tensors of each parameter, all else that votes need, and the steps."""
    kept = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            kept += [torch.as_tensor(state[key]).clone() for key in sorted(state)]
    places = [optimizer.committed_step]
    if isinstance(optimizer, distlion.LocalSteps):
        places.append(optimizer.local_step)
        momentum = (
            optimizer.outer_buffers
            if hasattr(optimizer, "outer_buffers")
            else optimizer.outer_optimizer.outer_momentum.buffers  # as in 0.1.0
        )
        kept += [each.detach().clone() for each in (*optimizer.common_point, *momentum)]
    return [*kept, torch.tensor(places)]


OPTIMIZERS = {
    "votes": lambda model: distlion.DistributedLion(
        model.named_parameters(), lr=0.01, weight_decay=0.1
    ),
    "feedback": lambda model: distlion.DistributedLion(
        model.named_parameters(), lr=0.01, aggregation=distlion.FeedbackVote(2)
    ),
    "local": make_local,
}


def train(rank: int, folder: str) -> None:
    """Train each optimizer as one of two workers, and save all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, make in OPTIMIZERS.items():
        model = make_model()
        optimizer = make(model)
        for step in range(STEPS):
            set_grads(model, rank, step)
            optimizer.step()
        distlion.save_checkpoint(f"{folder}/{name}", model, optimizer)
        alone = f"{folder}/{name}-{rank}"
        torch.save(optimizer.state_dict(), f"{alone}.pt")
        expected = {
            "params": [param.detach().clone() for param in model.parameters()],
            "state": list_tensors(optimizer),
        }
        torch.save(expected, f"{alone}-expected.pt")
    dist.destroy_process_group()


def main() -> None:
    """Save all into a folder."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    mp.spawn(train, (str(folder),), nprocs=2)
    (folder / "store").unlink(missing_ok=True)
    (folder / "VERSION").write_text(f"{distlion.__version__}\n")


if __name__ == "__main__":
    main()
