"""Fine-tune a pretrained text classifier with votes, or with DDP and AdamW for comparison.

    torchrun --nproc-per-node 2 examples/09_finetune.py --model MODEL --data FOLDER    # votes

With --before it runs DDP and AdamW. MODEL is a name of the Hugging Face Hub or a folder. FOLDER has
train.jsonl and test.jsonl with a line {"text": ..., "label": 0} for each example. `make finetune`
fetches both and runs both.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from distlion.integrations.transformers import DistributedLion, VotingMixin

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--model", required=True, help="pretrained network: a name or a folder")
parser.add_argument("--data", type=Path, required=True, help="folder of the examples")
parser.add_argument("--before", action="store_true", help="DDP and AdamW, without votes")
parser.add_argument("--lr", type=float, default=2e-4, help="AdamW's rate; votes take half of it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--tokens", type=int, default=48, help="of a text; the rest is cut off")
parser.add_argument("--folder", default="runs/finetune", help="where results go")
args = parser.parse_args()

set_seed(1)  # the new head starts alike on all ranks
tokenizer = AutoTokenizer.from_pretrained(args.model)


def read(name):
    lines = (args.data / f"{name}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=args.tokens)
    return [
        {"input_ids": ids, "labels": row["label"]}
        for ids, row in zip(encoded["input_ids"], rows, strict=True)
    ]


def score(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


train, test = read("train"), read("test")
n_classes = 1 + max(row["labels"] for row in train)
model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=n_classes)
arguments = TrainingArguments(
    args.folder,
    max_steps=args.steps,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=64,
    learning_rate=args.lr if args.before else args.lr / 2,  # half of AdamW's
    weight_decay=0.01 if args.before else 0.02,  # twice AdamW's
    warmup_steps=args.steps // 10,
    logging_steps=max(1, args.steps // 6),
    save_strategy="no",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
sets = {
    "train_dataset": train,
    "eval_dataset": test,
    "compute_metrics": score,
    "data_collator": DataCollatorWithPadding(tokenizer),
}
if args.before:
    trainer = Trainer(model, arguments, **sets)
else:

    class VotingTrainer(VotingMixin, Trainer): ...

    trainer = VotingTrainer(
        model, arguments, **sets, optimizer_cls_and_kwargs=(DistributedLion, {"cautious": True})
    )

started = time.monotonic()
trainer.train()
seconds = time.monotonic() - started
found = trainer.evaluate()
if trainer.is_world_process_zero():
    ranks = trainer.args.world_size
    gradients = 2 * (ranks - 1) / ranks * 4 * sum(p.numel() for p in model.parameters())
    sent = gradients if args.before else trainer.voter.traffic.last_sent_bytes
    result = {
        "method": "DDP, AdamW" if args.before else "distlion, votes",
        "accuracy": found["eval_accuracy"],
        "loss": found["eval_loss"],
        "seconds": seconds,
        "megabytes": sent / 1e6,
    }
    name = "before" if args.before else "after"
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    Path(args.folder, f"{name}.json").write_text(json.dumps(result), "utf-8")
    print(
        f"{result['method']}: accuracy {result['accuracy']:.3f}, loss {result['loss']:.3f} on "
        f"{len(test)} tests; {seconds:.0f} s for {args.steps} steps of {16 * ranks} examples; "
        f"{result['megabytes']:.2f} MB sent by a worker in a step"
    )
