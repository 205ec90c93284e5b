"""Accelerate, and the three lines that change for one bit per parameter.

    torchrun --nproc-per-node 2 examples/03_accelerate.py            # after: votes
    torchrun --nproc-per-node 2 examples/03_accelerate.py --before   # before: DDP and AdamW

Both train a small classifier on scikit-learn's digits; ``accelerate launch`` does as well.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distlion.integrations.accelerate import DistributedLion, VotingAccelerator  # 1

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="plain Accelerate, without votes")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help="of checkpoints")
parser.add_argument("--resume", action="store_true", help="resume from the last saved epoch")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
on_cpu = not torch.cuda.is_available()
if args.before:
    accelerator = Accelerator(cpu=on_cpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
else:
    accelerator = VotingAccelerator(cpu=on_cpu)  # 2
    optimizer = DistributedLion(
        model.parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True
    )  # 3
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs * 47)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

saved = sorted(args.folder.glob("epoch-*"))
if args.resume:
    accelerator.load_state(str(saved[-1]))
for epoch in range(len(saved) if args.resume else 0, args.epochs):
    for batch, target in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), target))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(str(args.folder / f"epoch-{epoch:03d}"))

if accelerator.is_main_process:
    with torch.no_grad():
        guess = accelerator.unwrap_model(model)(images[1500:].to(accelerator.device)).argmax(1)
    accuracy = (guess.cpu() == labels[1500:]).float().mean()
    print(f"test accuracy {accuracy:.3f}")
    if not args.before:
        print(f"bytes sent in a step {optimizer.optimizer.traffic.last_sent_bytes}")
accelerator.end_training()
