"""A plain DDP script, and the change for one bit per parameter.

    torchrun --nproc-per-node 2 examples/01_one_line_change.py            # after: votes
    torchrun --nproc-per-node 2 examples/01_one_line_change.py --before   # before: DDP and AdamW

Both train the same small classifier on scikit-learn's digits, every rank on its own part.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distlion

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="DDP with AdamW instead")
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)
mine = torch.arange(1500)[rank::world_size]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

if args.before:
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
else:  # the change: no DDP around the model, another optimizer
    optimizer = distlion.DistributedLion(
        model.parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True
    )

generator = torch.Generator().manual_seed(rank)
for _ in range(args.steps):
    batch = mine[torch.randint(len(mine), (32,), generator=generator)]
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    n_parameters = sum(param.numel() for param in model.parameters())
    if args.before:
        sent = f"about {2 * (world_size - 1) / world_size * 4 * n_parameters:.0f} (ring, fp32)"
    else:
        sent = str(optimizer.traffic.last_sent_bytes)
    print(f"test accuracy {accuracy:.3f}, bytes sent in a step {sent}")
dist.destroy_process_group()
