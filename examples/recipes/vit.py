r"""Vision transformers of arXiv:2404.00438 on CIFAR-10 and ImageNet-1k.

    torchrun --nproc-per-node 2 examples/recipes/vit.py --tiny       # digits, on any machine

On a cluster, with pictures in DATA/train/CLASS/ and DATA/validation/CLASS/, or a data set's name:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/recipes/vit.py --preset imagenet-s16 --data DATA --loaders 8 --randaugment
    torchrun --nproc-per-node 4 examples/recipes/vit.py --preset cifar10 --data uoft-cs/cifar10
    ... --data ILSVRC/imagenet-1k --streaming      # nothing is downloaded first

Models and lengths are from arXiv:2404.00438, section 5. On CIFAR-10 it trains a ViT for 200 epochs,
with 4 to 32 workers that read 32 pictures each; on ImageNet it trains ViT-S/16 and ViT-B/16. lr and
weight decay on CIFAR-10 are from the table of figure 2's hyperparameters in its appendix. The
numbers on ImageNet are from arXiv:2302.06675, section 5, and its authors' notes: lr 1e-4 and weight
decay 10 for a ViT with strong augmentation, 300 epochs of batches of 4,096, Mixup. The warm-up of
10,000 steps is AdamW's, arXiv:2010.11929.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from PIL import Image
from runner import Batch, Numbers, Workers, add_options, train
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import ViTConfig, ViTForImageClassification


@dataclass(frozen=True)
class Preset:
    """A model, its pictures, and its numbers.

    Attributes:
        config: Arguments of ViTConfig.
        epochs: Passes over the data.
        numbers: Hyperparameters; ``steps`` follow from the epochs.
        is_global: True if ``numbers.batch`` is the batch of all workers together.
        mixup: Parameter alpha of Mixup; 0 for none.
    """

    config: dict[str, int]
    epochs: int
    numbers: Numbers
    is_global: bool = False
    mixup: float = 0.0


def vit(size: int, patch: int, hidden: int, layers: int, heads: int) -> dict[str, int]:
    """Return arguments of ViTConfig."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"image_size": size, "patch_size": patch, "intermediate_size": 4 * hidden, **shape}


IMAGENET = Numbers(0, 4096, lr=1e-4, weight_decay=10.0, warmup_steps=10_000, clip=1.0)
PRESETS = {
    "cifar10": Preset(vit(32, 4, 512, 6, 8), 200, Numbers(0, 32, lr=5e-5, weight_decay=0.005)),
    "imagenet-s16": Preset(vit(224, 16, 384, 12, 6), 300, IMAGENET, is_global=True, mixup=0.5),
    "imagenet-b16": Preset(vit(224, 16, 768, 12, 12), 300, IMAGENET, is_global=True, mixup=0.5),
    "tiny": Preset(vit(8, 2, 48, 2, 4), 6, Numbers(0, 16, lr=1e-3, weight_decay=0.03)),
}


class Pictures:
    """Pictures of one split, resized to one size.

    Args:
        rows: Data set of ``datasets`` with a picture and a label in each row.
        size: Side of the resulting squares, in pixels.
        augment: Function that changes a picture; None for no changes.
    """

    def __init__(self, rows: Any, size: int, augment: Any = None) -> None:
        self.rows, self.size, self.augment = rows, size, augment
        kinds = {type(kind).__name__: name for name, kind in rows.features.items()}
        if not {"Image", "ClassLabel"} <= kinds.keys():
            raise SystemExit(f"expected columns of pictures and classes, got {dict(rows.features)}")
        self.picture, self.label = kinds["Image"], kinds["ClassLabel"]
        self.n_classes = rows.features[self.label].num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.read(self.rows[index])

    def read(self, row: dict[str, Any]) -> Batch:
        """Return a row's ``pixel_values``, (3, size, size) float32, and its label."""
        picture = row[self.picture].convert("RGB")
        if self.augment is not None:
            picture = self.augment(picture)
        pixels = np.asarray(picture.resize((self.size, self.size)), dtype=np.float32)
        return {
            "pixel_values": torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1),
            "labels": torch.tensor(row[self.label]),
        }


def crop_and_mirror(picture: Image.Image) -> Image.Image:
    """Cut out a random part of 25 to 100 % of the area, and mirror every second one."""
    width, height = picture.size
    share = math.sqrt(float(torch.empty(()).uniform_(0.25, 1)))
    left, top = (torch.rand(2) * (1 - share) * torch.tensor([width, height])).tolist()
    picture = picture.crop((left, top, left + share * width, top + share * height))
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else picture


def make_augmentation(args: argparse.Namespace) -> Any:
    """Return the function that augments pictures: crops, mirrors, and RandAugment if asked for."""
    if not args.randaugment:
        return crop_and_mirror
    from torchvision.transforms.v2 import Compose, RandAugment

    return Compose([crop_and_mirror, RandAugment(num_ops=2, magnitude=15)])


def open_pictures(args: argparse.Namespace, size: int) -> tuple[Pictures, Pictures]:
    """Return the training and the validation pictures."""
    if args.data is None:
        digits = load_digits()
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
        )
        grays = (16 * digits.images).clip(0, 255).astype("uint8")
        rows = {"image": [Image.fromarray(gray) for gray in grays], "label": digits.target}
        whole = datasets.Dataset.from_dict(rows, features=features)
        parts = whole.select(range(1536)), whole.select(range(1536, 1797))
        return Pictures(parts[0], size), Pictures(parts[1], size)
    found = datasets.load_dataset(args.data, streaming=args.streaming)
    held_out = next((found[name] for name in ("validation", "test") if name in found), None)
    if held_out is None or "train" not in found:
        raise SystemExit(f"{args.data} has {list(found)}; expected train, and validation or test")
    return Pictures(found["train"], size, make_augmentation(args)), Pictures(held_out, size)


class Order:
    """Numbers of the examples that a worker reads, batch by batch, from a step on."""

    def __init__(self, n_examples: int, batch: int, workers: Workers, step: int) -> None:
        self.n_examples, self.batch, self.workers, self.step = n_examples, batch, workers, step

    def __iter__(self) -> Iterator[list[int]]:
        n_steps, step = self.n_examples // (self.batch * self.workers.size), self.step
        while True:
            epoch, first = step // n_steps, step % n_steps
            order = torch.randperm(self.n_examples, generator=torch.Generator().manual_seed(epoch))
            mine = order[self.workers.rank :: self.workers.size].split(self.batch)
            for indices in mine[first:n_steps]:
                yield indices.tolist()
            step += n_steps - first


def read_in_turn(pictures: Pictures, batch: int, workers: Workers, step: int) -> Iterator[Batch]:
    """Yield a worker's batches of a stream; a resumed run skips the batches already read."""
    epoch = 0
    while True:
        stream = pictures.rows.shuffle(seed=epoch, buffer_size=10_000)
        mine, rows = split_dataset_by_node(stream, workers.rank, workers.size), []
        for row in mine:
            rows.append(row)
            if len(rows) == batch:
                if step == 0:
                    yield default_collate([pictures.read(each) for each in rows])
                step, rows = max(0, step - 1), []
        epoch += 1


def count_examples(pictures: Pictures) -> int:
    """Return the number of pictures, which a stream may not know."""
    if not isinstance(pictures.rows, datasets.IterableDataset):
        return len(pictures)
    split = (pictures.rows.info.splits or {}).get("train")
    if split is None or split.num_examples is None:
        raise SystemExit("--examples is needed: this stream does not report its number of pictures")
    return split.num_examples


def choose_numbers(
    args: argparse.Namespace, preset: Preset, workers: Workers, n_examples: int
) -> Numbers:
    """Return a preset's numbers for these workers and pictures, with the options' changes."""
    share = preset.numbers.batch // (workers.size if preset.is_global else 1)
    numbers = replace(preset.numbers, batch=share).changed_by(args)
    steps_of_epoch = n_examples // (numbers.batch * workers.size)
    if steps_of_epoch == 0:
        raise SystemExit(f"{n_examples} pictures are less than {numbers.batch} for each worker")
    return replace(numbers, steps=args.steps or preset.epochs * steps_of_epoch)


def list_batches(pictures: Pictures, workers: Workers, *, streaming: bool) -> Iterator[Batch]:
    """Yield a worker's share of the pictures, once."""
    if streaming:
        rows = split_dataset_by_node(pictures.rows, workers.rank, workers.size)
        mine = (pictures.read(row) for row in rows)
    else:
        mine = (pictures[i] for i in range(workers.rank, len(pictures), workers.size))
    while some := list(itertools.islice(mine, 256)):
        yield default_collate(some)


def parse_options() -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    parser.add_argument("--preset", choices=list(PRESETS), default="cifar10")
    parser.add_argument("--data", help="a folder of pictures, or a name on the Hub")
    parser.add_argument("--streaming", action="store_true", help="read pictures while training")
    parser.add_argument("--examples", type=int, help="of a stream with an unknown number")
    parser.add_argument("--loaders", type=int, default=0, help="processes that read pictures")
    parser.add_argument("--randaugment", action="store_true", help="needs torchvision")
    args = parser.parse_args()
    if args.data is None and not args.tiny:
        parser.error("--data: a folder of pictures or a data set's name; or --tiny")
    return args


def main() -> None:
    """Train, and print the validation accuracy."""
    args = parse_options()
    preset = PRESETS["tiny" if args.tiny else args.preset]
    workers = Workers()
    pictures, held_out = open_pictures(args, preset.config["image_size"])
    numbers = choose_numbers(args, preset, workers, args.examples or count_examples(pictures))
    batch = numbers.batch
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(**preset.config, num_channels=3, num_labels=pictures.n_classes)
    )

    def batches(step: int) -> Iterator[Batch]:
        if args.streaming:
            return read_in_turn(pictures, batch, workers, step)
        order = Order(len(pictures), batch, workers, step)
        return iter(DataLoader(pictures, batch_sampler=order, num_workers=args.loaders))

    def loss_of(net: nn.Module, read: Batch) -> Tensor:
        pixels, labels = (read[name].to(workers.device) for name in ("pixel_values", "labels"))
        if not preset.mixup:
            return nn.functional.cross_entropy(net(pixels).logits, labels)
        share = torch.distributions.Beta(preset.mixup, preset.mixup).sample().item()
        logits = net(share * pixels + (1 - share) * pixels.flip(0)).logits
        own = nn.functional.cross_entropy(logits, labels)
        return share * own + (1 - share) * nn.functional.cross_entropy(logits, labels.flip(0))

    def evaluate(net: nn.Module) -> str:
        right = seen = 0
        for read in list_batches(held_out, workers, streaming=args.streaming):
            guess = net(read["pixel_values"].to(workers.device)).logits.argmax(1).cpu()
            right, seen = right + int((guess == read["labels"]).sum()), seen + len(guess)
        right_of_all, seen_of_all = workers.add(right, seen)
        return f"accuracy {right_of_all / seen_of_all:.4f} of {seen_of_all:.0f} pictures"

    train(args, workers, model, numbers, batches=batches, loss_of=loss_of, evaluate=evaluate)


if __name__ == "__main__":
    main()
