"""FSDP2 on a 2D mesh (HSDP), and the three lines that change for one bit per parameter.

    torchrun --nproc-per-node 4 examples/08_fsdp2.py            # after: 2 workers of 2 ranks vote
    torchrun --nproc-per-node 4 examples/08_fsdp2.py --before   # before: HSDP and AdamW

Both train a small classifier on scikit-learn's digits.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distlion import DistributedLion  # 1

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="plain FSDP2, without votes")
parser.add_argument("--shards", type=int, default=2, help="number of ranks of a worker")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--folder", default="runs/fsdp2", help="folder of the checkpoint")
parser.add_argument("--resume", action="store_true", help="resume from the last saved epoch")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if world_size % args.shards or world_size < 2 * args.shards:
    raise SystemExit(f"{world_size} ranks are not two or more workers of {args.shards}")
mesh = init_device_mesh(
    device, (world_size // args.shards, args.shards), mesh_dim_names=("replicate", "shard")
)

digits = load_digits()
images = (torch.tensor(digits.data, dtype=torch.float32) / 16).to(device)
labels = torch.tensor(digits.target).to(device)
mine = torch.arange(1500)[rank::world_size]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
for layer in (model[0], model[2], model):
    if args.before:
        fully_shard(layer, mesh=mesh)
    else:
        fully_shard(layer, mesh=mesh["shard"])  # 2
if args.before:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
else:
    optimizer = DistributedLion(
        model.named_parameters(),
        lr=1.5e-3,
        weight_decay=0.02,
        cautious=True,
        process_group=mesh.get_group(0),
    )  # 3


def collect(epoch: int) -> dict[str, Any]:
    """Return the content of a checkpoint, with the momenta of all workers."""
    optim = get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optim, "epoch": epoch}


epoch = 0
if args.resume:
    state = collect(epoch)
    dcp.load(state, checkpoint_id=f"{args.folder}/{max(map(int, os.listdir(args.folder)))}")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    epoch = state["epoch"]
while epoch < args.epochs:
    order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))
    for batch in mine[order].split(8):
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    epoch += 1
    dcp.save(collect(epoch), checkpoint_id=f"{args.folder}/{epoch}")

with torch.no_grad():
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
if rank == 0:
    print(f"test accuracy {accuracy:.3f}")
    if not args.before:
        print(f"bytes sent in a step {optimizer.traffic.last_sent_bytes}")
dist.destroy_process_group()
