"""Hugging Face's Trainer as a member of a crew: kill it, start it again, and the others go on.

    distlion crew --port 29400                        # on a host that stays
    export DISTLION_CREW_SECRET=four-random-words     # for each member
    python examples/12_crew_with_trainer.py           # two members or more, on any hosts

It trains a small vision transformer on scikit-learn's digits.
"""

import argparse
import logging

import torch
from sklearn.datasets import load_digits
from transformers import (
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    get_cosine_schedule_with_warmup,
)

import distlion
from distlion.integrations.crew_trainer import CrewMixin

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--store", default="localhost:29400", help="where distlion crew listens")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--members", type=int, default=2, help="fewest members that train")
parser.add_argument("--folder", default="runs/crew_trainer", help="folder of the checkpoints")
args = parser.parse_args()
logging.basicConfig(level="WARNING", format="%(message)s")
logging.getLogger("distlion").setLevel("INFO")  # who came and who left

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
data = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]
torch.manual_seed(0)
model = ViTForImageClassification(
    ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
    )
).to("cuda" if torch.cuda.is_available() else "cpu")


class CrewTrainer(CrewMixin, Trainer): ...


def score(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


with distlion.Crew(args.store, min_workers=args.members) as crew:
    optimizer = crew.optimizer(
        model.named_parameters(), lr=1.5e-3, weight_decay=0.02, cautious=True, retry=True
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 5, args.steps)
    crew.carry(scheduler=scheduler)  # a newcomer takes the others' learning rate
    arguments = TrainingArguments(
        f"{args.folder}/{crew.id}",
        max_steps=args.steps,
        per_device_train_batch_size=16,
        data_seed=crew.id,  # each member shuffles for itself
        save_steps=max(1, args.steps // 2),
        logging_steps=max(1, args.steps // 6),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    sets = {"train_dataset": data[:1500], "eval_dataset": data[1500:], "compute_metrics": score}
    trainer = CrewTrainer(model, arguments, **sets, optimizers=(optimizer, scheduler))
    trainer.train()
    size = crew.size

print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.3f}, with {size} members at the end")
