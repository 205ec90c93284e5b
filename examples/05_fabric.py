"""Lightning Fabric, and the three lines that change for one bit per parameter.

    torchrun --nproc-per-node 2 examples/05_fabric.py            # after: votes
    torchrun --nproc-per-node 2 examples/05_fabric.py --before   # before: DDP and AdamW

Both train a small classifier on scikit-learn's digits.
"""

import argparse
import os

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distlion.integrations.fabric import DistributedLion, VotingStrategy  # 1

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="plain Fabric, without votes")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--folder", default="runs/fabric", help="folder of the checkpoint")
parser.add_argument("--resume", action="store_true", help="resume from the last saved epoch")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

fabric = lightning.Fabric(
    strategy=DDPStrategy() if args.before else VotingStrategy(),  # 2
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # machines of torchrun
)
fabric.launch()
loader = fabric.setup_dataloaders(
    DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
if args.before:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
else:
    optimizer = DistributedLion(
        model.parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True
    )  # 3
model, optimizer = fabric.setup(model, optimizer)

state = {"model": model, "optimizer": optimizer, "epoch": 0}
if args.resume:
    fabric.load(f"{args.folder}/last.ckpt", state)
while state["epoch"] < args.epochs:
    for batch, target in loader:
        fabric.backward(nn.functional.cross_entropy(model(batch), target))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    state["epoch"] += 1
    fabric.save(f"{args.folder}/last.ckpt", state)

if fabric.is_global_zero:
    with torch.no_grad():
        guess = model(images[1500:].to(fabric.device)).argmax(1)
    print(f"test accuracy {(guess.cpu() == labels[1500:]).float().mean():.3f}")
    if not args.before:
        print(f"bytes sent in a step {optimizer.optimizer.traffic.last_sent_bytes}")
