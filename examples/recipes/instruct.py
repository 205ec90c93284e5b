r"""Instruction fine-tuning of a small language model by TRL's trainer: LoRA, or all parameters.

    torchrun --nproc-per-node 2 examples/recipes/instruct.py --tiny          # makes its own model
    torchrun --nproc-per-node 2 examples/recipes/instruct.py --tiny --lora

On a cluster:

    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/recipes/instruct.py --model Qwen/Qwen2.5-0.5B --data tatsu-lab/alpaca --lora

arXiv:2404.00438, section 5, fine-tunes a model of 7 billion parameters with instructions. The
numbers are from a command that one of its authors has published
(kyleliang919/distributed-lion-pytorch): lr 1e-4, weight decay 0.05, 100 of 500 steps of warm-up, a
cosine, 2 micro-steps of 4 examples for each of 4 workers. Rank 16 of LoRA on all linear layers is
our choice.
"""

import argparse
import os
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from distlion.integrations.transformers import DistributedLion, VotingMixin

WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
WORDS += " fifteen sixteen seventeen eighteen add and is <pad> <end>"


class VotingSFT(VotingMixin, SFTTrainer):
    """TRL's trainer with workers that vote."""


def make_tiny() -> tuple[torch.nn.Module, Any, Dataset]:
    """Return a model of 0.1 million parameters, its tokenizer, and sums of numbers up to nine."""
    words = WORDS.split()
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", eos_token="<end>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=words.index("<pad>"),
        eos_token_id=words.index("<end>"),
        bos_token_id=None,
    )
    sums = [
        {"prompt": f"add {words[a]} and {words[b]} is ", "completion": f"{words[a + b]} <end>"}
        for a in range(10)
        for b in range(10)
    ]
    return LlamaForCausalLM(config), fast, Dataset.from_list(sums)


def as_prompt(row: dict[str, str]) -> dict[str, str]:
    """Make a prompt and its completion from Alpaca's columns."""
    given = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
    return {
        "prompt": f"### Instruction:\n{row['instruction']}{given}\n\n### Response:\n",
        "completion": row["output"],
    }


def open_data(name: str) -> Dataset:
    """Return rows with a prompt and a completion each."""
    is_file = name.endswith((".json", ".jsonl"))
    rows = load_dataset("json", data_files=name) if is_file else load_dataset(name)
    rows = rows["train"]
    if {"prompt", "completion"} <= set(rows.column_names):
        return rows
    if not {"instruction", "output"} <= set(rows.column_names):
        raise SystemExit(
            f"{name} has the columns {rows.column_names}; expected prompt and completion, or "
            "instruction, input and output"
        )
    return rows.map(as_prompt, remove_columns=rows.column_names)


def main() -> None:
    """Train, and print the validation loss."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model that learns to add")
    parser.add_argument(
        "--model", default="Qwen/Qwen2.5-0.5B", help="a name on the Hub, or a folder"
    )
    parser.add_argument("--data", help="a name on the Hub, or a file of JSON lines")
    parser.add_argument("--lora", action="store_true", help="train only adapters")
    parser.add_argument("--steps", type=int, help="default 500; tiny: 200")
    parser.add_argument("--lr", type=float, help="default 1e-4; tiny: 1e-3, LoRA 5e-3")
    parser.add_argument("--folder", default="runs/instruct", help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this with torchrun: torchrun --nproc-per-node 2 instruct.py --tiny")
    if args.tiny:
        model, tokenizer, data = make_tiny()
        steps, lr, warmup, held_out = 200, 5e-3 if args.lora else 1e-3, 10, 10
    elif args.data is None:
        parser.error("--data: a data set such as tatsu-lab/alpaca, or a file; or --tiny")
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        data = open_data(args.data)
        steps, lr, warmup, held_out = 500, 1e-4, 100, min(500, len(data) // 20)
    steps = args.steps or steps
    parts = data.train_test_split(test_size=held_out, seed=0)
    on_gpu = torch.cuda.is_available()
    arguments = SFTConfig(
        args.folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=args.lr or lr,
        weight_decay=0.05,
        lr_scheduler_type="cosine",
        warmup_steps=warmup,
        logging_steps=max(1, steps // 10),
        eval_strategy="steps",
        eval_steps=max(1, steps // 2),
        save_steps=max(1, steps // 2),
        save_total_limit=2,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
    )
    trainer = VotingSFT(
        model,
        arguments,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if args.lora else None,
        optimizer_cls_and_kwargs=(DistributedLion, {"betas": (0.9, 0.99)}),  # the papers'
    )
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        n_trained = sum(
            param.numel() for param in trainer.model.parameters() if param.requires_grad
        )
        print(f"{loss:.4f} nats of validation loss")
        print(f"{n_trained} parameters trained")
        print(f"bytes sent in a step {trainer.voter.traffic.last_sent_bytes}")


if __name__ == "__main__":
    main()
