"""Ray Train, and the three lines that change for one bit per parameter.

    python examples/07_ray.py            # after: votes
    python examples/07_ray.py --before   # before: DDP and AdamW

Both train a small classifier on scikit-learn's digits, with two workers on this machine. They
resume from a checkpoint if they find one.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn

from distlion import DistributedLion  # 1


def train(config: dict[str, Any]) -> None:
    """Train on one worker; Ray calls this on all of them."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    digits = load_digits()
    images = (torch.tensor(digits.data, dtype=torch.float32) / 16).to(device)
    labels = torch.tensor(digits.target).to(device)
    mine = torch.arange(1500)[rank::world_size]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    if config["before"]:
        model = ray.train.torch.prepare_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    else:
        model = ray.train.torch.prepare_model(model, parallel_strategy=None)  # 2
        optimizer = DistributedLion(
            model.parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True
        )  # 3

    first, part = 0, f"worker-{rank}.pt"
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, part), map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        generator = torch.Generator().manual_seed(epoch * world_size + rank)
        for batch in mine[torch.randperm(len(mine), generator=generator)].split(16):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        metrics = {"accuracy": float(accuracy), "epoch": epoch}
        if not config["before"]:
            metrics["sent_bytes"] = optimizer.traffic.last_sent_bytes
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, os.path.join(folder, part))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)  # Ray puts all parts into one folder


def main() -> None:
    """Train, and print the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", action="store_true", help="plain Ray Train, without votes")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"), help="of checkpoints")
    args = parser.parse_args()
    on_gpus = torch.cuda.device_count() > 1
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"before": args.before, "epochs": args.epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=on_gpus),
        # With this name, a second call continues from the last checkpoint of the first.
        run_config=ray.train.RunConfig(
            name="before" if args.before else "votes", storage_path=str(args.folder.resolve())
        ),
    )
    result = trainer.fit()
    print(f"test accuracy {result.metrics['accuracy']:.3f}")
    if not args.before:
        print(f"bytes sent in a step {result.metrics['sent_bytes']}")
    print(f"checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main()
