r"""A small ResNet with Lightning, on one machine or several, with one bit per parameter.

    torchrun --nproc-per-node 2 examples/10_images.py            # two workers here
    torchrun --nnodes 4 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 \
        --master-port 29500 examples/10_images.py --num-nodes 4  # the first of four machines

It trains on made-up pictures of CIFAR-10's size: ten patterns, shifted, in noise. Replace
`make_pictures` by a data set of yours. With --before it runs DDP and AdamW.
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distlion
from distlion.integrations.lightning import DistributedLion, VotingStrategy

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="DDP and AdamW, without votes")
parser.add_argument("--num-nodes", type=int, default=1, help="machines, as torchrun's --nnodes")
parser.add_argument("--lr", type=float, default=8e-3, help="AdamW's rate; votes take a quarter")
parser.add_argument("--decay", type=float, default=0.01, help="AdamW's; votes take four times it")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, default=-1, help="end after so many steps")
parser.add_argument("--pictures", type=int, default=4096, help="to train on")
parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
parser.add_argument("--precision", default="32-true", help="or bf16-mixed, 16-mixed")
parser.add_argument("--folder", default="runs/images", help="of checkpoints")
parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
args = parser.parse_args()
folder = f"{args.folder}/{'before' if args.before else 'votes'}"


def make_pictures(number, seed):
    """Return pictures (number, 3, 32, 32) of ten classes, and their classes."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (number,), generator=generator)
    shifts = torch.randint(-3, 4, (number, 2), generator=generator).tolist()
    pictures = [
        patterns[which].roll(shift, (1, 2))
        for which, shift in zip(classes.tolist(), shifts, strict=True)
    ]
    noise = torch.randn(number, 3, 32, 32, generator=generator)
    return TensorDataset(torch.stack(pictures) + noise, classes)


class Block(nn.Module):
    """Two convolutions with BatchNorm, beside a shortcut."""

    def __init__(self, channels, more, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, more, 3, stride, 1, bias=False),
            nn.BatchNorm2d(more),
            nn.ReLU(),
            nn.Conv2d(more, more, 3, 1, 1, bias=False),
            nn.BatchNorm2d(more),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels, more, 1, stride, bias=False), nn.BatchNorm2d(more)
        )

    def forward(self, pictures):
        return nn.functional.relu(self.body(pictures) + self.shortcut(pictures))


class ResNet(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, number):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float()
        self.log("accuracy", right.mean(), sync_dist=True)

    def configure_optimizers(self):
        decayed = [(name, param) for name, param in self.named_parameters() if param.dim() >= 2]
        others = [(name, param) for name, param in self.named_parameters() if param.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": args.decay * (1 if args.before else 4)},
            {"params": others, "weight_decay": 0.0},
        ]
        if args.before:
            optimizer = torch.optim.AdamW(groups, lr=args.lr)
        else:
            clip_norm = distlion.ClipNorm(1.0, scope="global")
            optimizer = DistributedLion(groups, lr=args.lr / 4, cautious=True, clip_norm=clip_norm)
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, steps // 5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / (steps - warm_up))),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class AverageBuffers(Callback):
    """Let all workers validate and save with the same running statistics of BatchNorm.

    Lightning runs it before every ModelCheckpoint, wherever it stands in the list.
    """

    def on_validation_start(self, trainer, module):
        distlion.average_buffers(module)

    def on_train_epoch_end(self, trainer, module):
        distlion.average_buffers(module)


trainer = lightning.Trainer(
    strategy=DDPStrategy() if args.before else VotingStrategy(),
    gradient_clip_val=1.0 if args.before else None,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=args.num_nodes,
    precision=args.precision,
    max_epochs=args.epochs,
    max_steps=args.steps,
    callbacks=[
        *([] if args.before else [AverageBuffers()]),
        ModelCheckpoint(
            folder,
            monitor="accuracy",
            mode="max",
            save_last=True,
            enable_version_counter=False,  # last.ckpt is always the latest one
        ),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = ResNet(args.width)
trainer.fit(
    module,
    DataLoader(make_pictures(args.pictures, seed=1), batch_size=32, shuffle=True, drop_last=True),
    DataLoader(make_pictures(512, seed=2), batch_size=64),
    ckpt_path=f"{folder}/last.ckpt" if args.resume else None,
)
if trainer.is_global_zero:
    n_parameters = sum(param.numel() for param in module.parameters())
    size = trainer.world_size
    if args.before:
        sent = 2 * (size - 1) * 4 * n_parameters // size  # of DDP's ring, by the formula
    else:
        sent = trainer.strategy.voters[0].traffic.last_sent_bytes
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} after {trainer.global_step} steps")
    print(f"{n_parameters:,} parameters, {sent:,} bytes sent by a worker in a step")
