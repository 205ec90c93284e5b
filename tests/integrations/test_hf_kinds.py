"""Kinds of training that a Trainer offers, with votes: each resumes, and replicas stay equal."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

import distlion
from cluster import run_workers
from integrations.job import Job

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "02_hf_trainer.py"


def enter(rank: int, world_size: int) -> None:
    """Set what torchrun sets."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


def run_example(rank: int, world_size: int, arguments: list[str]) -> dict[str, Any]:
    enter(rank, world_size)
    with mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments]):
        trainer = runpy.run_path(str(EXAMPLE), run_name="__main__")["trainer"]
    return {
        "steps": trainer.state.global_step,
        "kind": type(trainer.optimizer.optimizer).__name__,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def test_example_trains(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--steps", "4"]
    for found in run_workers(run_example, 2, arguments, timeout_s=120):
        assert found["kind"] == "DistributedLion" and found["steps"] == 4


def test_example_resumes(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path), "--steps"]
    run_workers(run_example, 2, [*options, "4"], timeout_s=120)
    for found in run_workers(run_example, 2, [*options, "24", "--resume"], timeout_s=120):
        assert found["steps"] == 24
        assert found["losses"][-1] < found["losses"][0]


def test_example_trains_without_its_three_lines(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--steps", "4", "--before"]
    for found in run_workers(run_example, 2, arguments, timeout_s=120):
        assert found["steps"] == 4 and found["kind"] == "AdamW"


def make_base(rank: int) -> Any:
    from integrations.sft_job import SentenceModel

    return SentenceModel(rank=0)


def make_lora(rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(rank)  # the adapter's values of this rank's own
    return get_peft_model(make_base(rank), LoraConfig(r=4, target_modules=["c_attn"]))


def make_trainer(folder: str, rank: int, kind: str, **options: Any) -> Any:
    """Make one with a small language model on digits as texts."""
    from transformers import TrainingArguments

    from integrations.with_trainer import VotingTrainer, make_arguments

    job = Job(folder, 2, steps=4)
    make, options_of_kind = KINDS[kind]
    optimizer = {
        "replicas": distlion.Replicas(check_every=1),
        "timeouts": distlion.Timeouts(step_s=20),
    }
    arguments = {**make_arguments(job), **options_of_kind, **options}
    common: dict[str, Any] = {
        "optimizer_cls_and_kwargs": (distlion.DistributedLion, optimizer),
    }
    if kind.startswith("SFT"):
        from trl import SFTConfig

        from integrations import with_sft_trainer as sft

        data = sft.make_dataset(job.dataset(deal="batches").order)
        if "LoRA" in kind:
            from peft import LoraConfig

            common["peft_config"] = LoraConfig(r=4, target_modules=["c_attn"])
        # Another class than that of the exam, which notes losses of its own model.
        trainer_class = type("SFT", (sft.VotingMixin, sft.SFTTrainer), {})
        config = SFTConfig(**arguments, max_length=64)
        tokenizer = sft.make_tokenizer()
        return trainer_class(
            make(rank), config, train_dataset=data, processing_class=tokenizer, **common
        )
    from integrations.sft_job import list_texts

    texts = list_texts(job.dataset(deal="batches").order)
    data = [{"input_ids": text, "labels": text} for text in texts]
    return VotingTrainer(
        make(rank),
        TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data[:16],
        **common,
    )


Make = Callable[[int], Any]
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "LoRA": (make_lora, {}),
    "label smoothing": (make_base, {"label_smoothing_factor": 0.1}),
    "tokens counted by worker": (make_base, {"average_tokens_across_devices": False}),
    "activation checkpointing": (make_base, {"activation_checkpointing": True}),
    "autocast": (make_base, {"bf16": True}),
    "bfloat16": (lambda rank: make_base(rank).bfloat16(), {}),
    "compiled": (make_base, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "accumulation, clipped": (make_base, {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}),
    "constant schedule": (make_base, {"lr_scheduler_type": "constant"}),
    "reduced on a plateau": (
        make_base,
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "train_sampling_strategy": "random",
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
    ),
    "SFT": (make_base, {"bf16": False, "packing": True, "packing_strategy": "wrapped"}),
    "SFT, LoRA": (make_base, {"bf16": True}),
}


def train_kind(rank: int, world_size: int, folder: str, kinds: list[str]) -> dict[str, Any]:
    """Return, for each kind, digests of parameters and momenta of a straight and a resumed run."""
    enter(rank, world_size)
    found = {}
    for kind in kinds:
        place = f"{folder}/{kind}"
        saving = {"save_strategy": "steps", "save_steps": 2}
        straight = make_trainer(place, rank, kind, **saving)
        before = {name: param.clone() for name, param in straight.model.named_parameters()}
        straight.train()
        resumed = make_trainer(f"{place} again", rank, kind)
        resumed.train(resume_from_checkpoint=f"{place}/checkpoint-2")
        moved = {
            name
            for name, param in straight.model.named_parameters()
            if not torch.equal(param, before[name])
        }
        trained = {name for name, p in straight.model.named_parameters() if p.requires_grad}
        files = Path(place, "checkpoint-2", "distlion").rglob("model-*.safetensors")
        found[kind] = {
            "straight": read_state(straight),
            "resumed": read_state(resumed),
            "moved": (moved, trained),
            "saved": {name for file in files for name in _names_in(file)},
            "steps": straight.voter.committed_step,
        }
    return found


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def read_state(trainer: Any) -> tuple[bytes, bytes]:
    params = [param.detach() for param in trainer.model.parameters()]
    momenta = [
        trainer.voter.state[param]["exp_avg"]
        for param in trainer.model.parameters()
        if param.requires_grad
    ]
    return tuple(  # type: ignore[return-value]
        b"".join(each.float().numpy().tobytes() for each in tensors)
        for tensors in (params, momenta)
    )


@pytest.mark.parametrize("group", ["Trainer", "SFT"])
def test_kinds_of_training_resume_with_equal_replicas(tmp_path: Path, group: str) -> None:
    kinds = [kind for kind in KINDS if kind.startswith("SFT") == (group == "SFT")]
    ranks = run_workers(train_kind, 2, str(tmp_path), kinds, timeout_s=400)
    for kind in kinds:
        first, second = (rank[kind] for rank in ranks)
        assert first["straight"][0] == second["straight"][0], f"{kind}: replicas differ"
        assert first["straight"][1] != second["straight"][1], f"{kind}: momenta are equal"
        for each in (first, second):
            assert each["straight"] == each["resumed"], kind
            moved, trained = each["moved"]
            assert moved == trained, kind
            assert ("LoRA" in kind) == all("lora_" in name for name in trained)
            assert each["saved"] == trained, kind
            assert each["steps"] == 4
