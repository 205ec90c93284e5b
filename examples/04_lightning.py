"""Lightning's Trainer, and the three lines that change for one bit per parameter.

    torchrun --nproc-per-node 2 examples/04_lightning.py            # after: votes
    torchrun --nproc-per-node 2 examples/04_lightning.py --before   # before: DDP and AdamW

Both train a small classifier on scikit-learn's digits.
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distlion.integrations.lightning import DistributedLion, VotingStrategy  # 1

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="plain Lightning, without votes")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--folder", default="runs/lightning", help="of checkpoints")
parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
args = parser.parse_args()
folder = f"{args.folder}/{'before' if args.before else 'votes'}"

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, number):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float()
        self.log("accuracy", right.mean(), sync_dist=True)

    def configure_optimizers(self):
        if args.before:
            return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)
        return DistributedLion(self.parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True)  # 2


trainer = lightning.Trainer(
    strategy=DDPStrategy() if args.before else VotingStrategy(),  # 3
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # machines of torchrun
    max_epochs=args.epochs,
    gradient_clip_val=1.0,
    # Without versions, last.ckpt is always the latest one.
    callbacks=[ModelCheckpoint(folder, save_last=True, enable_version_counter=False)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Classifier()
trainer.fit(
    module,
    DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True),
    DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=32),
    ckpt_path=f"{folder}/last.ckpt" if args.resume else None,
)
if trainer.is_global_zero:
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.3f}")
    if not args.before:
        print(f"bytes sent in a step {trainer.strategy.voters[0].traffic.last_sent_bytes}")
