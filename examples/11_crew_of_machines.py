"""A crew whose members are machines: FSDP2 shards inside each, and machines come and go.

    distlion crew --port 29400                        # on a host that stays
    export DISTLION_CREW_SECRET=four-random-words     # on each machine
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1       # each start has a store of its own
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 examples/11_crew_of_machines.py

Start the last line on two machines or more, or twice on one of them. Kill a process, and its
machine leaves; the others go on, and torchrun starts it again as a newcomer.
"""

import argparse
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distlion

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--store", default="localhost:29400", help="where distlion crew listens")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--machines", type=int, default=2, help="fewest machines that train")
args = parser.parse_args()
logging.basicConfig(level="INFO", format="%(message)s")

# 1 a group of this machine's processes; its limit is for a process of it that is stopped
device = "cuda" if torch.cuda.is_available() else "cpu"
backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
dist.init_process_group(backend, timeout=timedelta(seconds=60))
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
mesh = init_device_mesh(device, (dist.get_world_size(),))

digits = load_digits()
images = (torch.tensor(digits.data, dtype=torch.float32) / 16).to(device)
labels = torch.tensor(digits.target).to(device)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)  # 2 shards inside the machine

with distlion.Crew(args.store, member=mesh, min_workers=args.machines) as crew:  # 3
    optimizer = crew.optimizer(
        model.named_parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True
    )
    sampler = distlion.CrewSampler(crew, n_examples=1500, batch_size=8)
    while optimizer.committed_step < args.steps:
        batch = sampler.take()  # this process's part of the batch of its machine
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if optimizer.step():  # False on all processes where machines changed
            sampler.advance()
        optimizer.zero_grad()
    size = crew.size

with torch.no_grad():
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
if dist.get_rank() == 0:
    print(f"test accuracy {accuracy:.3f}, with {size} machines at the end")
dist.destroy_process_group()
