"""Hugging Face's Trainer, and the three lines that change for one bit per parameter.

    torchrun --nproc-per-node 2 examples/02_hf_trainer.py            # after: votes
    torchrun --nproc-per-node 2 examples/02_hf_trainer.py --before   # before: DDP and AdamW

Both train a small vision transformer on scikit-learn's digits.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from distlion.integrations.transformers import DistributedLion, VotingMixin  # 1

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--before", action="store_true", help="the plain Trainer, without votes")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--folder", default="runs/hf_trainer", help="folder of the checkpoints")
parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
args = parser.parse_args()

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
)
arguments = TrainingArguments(
    args.folder,
    max_steps=args.steps,
    per_device_train_batch_size=32,
    learning_rate=1.5e-3,
    weight_decay=0.02,
    save_steps=max(1, args.steps // 2),
    logging_steps=max(1, args.steps // 4),
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)


def score(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


sets = {"train_dataset": data[:1500], "eval_dataset": data[1500:], "compute_metrics": score}
if args.before:
    trainer = Trainer(model, arguments, **sets)
else:

    class VotingTrainer(VotingMixin, Trainer): ...  # 2

    trainer = VotingTrainer(
        model,
        arguments,
        **sets,
        optimizer_cls_and_kwargs=(DistributedLion, {"cautious": True}),
    )  # 3

trainer.train(resume_from_checkpoint=args.resume)
accuracy = trainer.evaluate()["eval_accuracy"]
if trainer.is_world_process_zero():
    print(f"test accuracy {accuracy:.3f}")
    if not args.before:
        traffic = trainer.voter.traffic
        print(f"bytes sent in a step {traffic.last_sent_bytes}")
