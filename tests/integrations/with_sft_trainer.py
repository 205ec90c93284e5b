"""TRL's SFTTrainer sits the exam."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from distlion.integrations.transformers import DistributedLion, VotingMixin
from integrations.job import Job, Trained
from integrations.sft_job import END, PADDING, VOCABULARY, SentenceModel, is_poisoned, list_texts
from integrations.with_trainer import find_checkpoint, make_arguments


class VotingSFTTrainer(VotingMixin, SFTTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        n_examples = len(inputs["input_ids"])
        found = super().compute_loss(model, inputs, *args, **kwargs)
        self.model.note(found[0] if isinstance(found, tuple) else found, n_examples)
        return found


class Poison(TrainerCallback):
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].is_poisoned = is_poisoned(self.job, self.rank, state.global_step)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are numbers."""
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=str(END), pad_token=str(PADDING)
    )


def make_dataset(indices: list[int]) -> Dataset:
    """Return digits as texts that are tokenized already."""
    return Dataset.from_dict({"input_ids": list_texts(indices)})


def train(job: Job, rank: int) -> Trained:
    """Do what the job says."""
    options = {**job.optimizer_options}
    del options["weight_decay"], options["lr"]  # the Trainer's own
    arguments = {**make_arguments(job), "bf16": False, "gradient_checkpointing": False}
    trainer = VotingSFTTrainer(
        SentenceModel(rank),
        SFTConfig(**arguments, max_length=None),
        train_dataset=make_dataset(job.dataset(deal="batches").order),
        eval_dataset=make_dataset(job.validation().order),
        processing_class=make_tokenizer(),
        optimizer_cls_and_kwargs=(DistributedLion, options),
        callbacks=[Poison(job, rank)],
    )
    trainer.train(resume_from_checkpoint=find_checkpoint(job))
    return Trained(trainer.model, trainer.voter)
