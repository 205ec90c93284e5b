"""What TRL's trainer and a plain loop do in its place: digits as texts, for a language model."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from integrations.job import Job

LENGTH = 64
VOCABULARY = 19  # the shades of a pixel, an end and a padding
END, PADDING = 17, 18


class SentenceModel(GPT2LMHeadModel):
    """A language model that notes losses as the exam's model does."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=END,
            eos_token_id=END,
            pad_token_id=PADDING,
        )
        super().__init__(config)
        self.losses: list[float] = []
        self.evaluated = 0
        self.is_poisoned = False
        self.transformer.wte.register_forward_hook(self._poison)

    def _poison(self, module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output * float("nan") if self.is_poisoned else output

    def note(self, loss: Tensor, n_examples: int) -> None:
        """Note the loss of a training batch, or how much was evaluated."""
        if self.training:
            self.losses.append(float(loss.detach()))
        else:
            self.evaluated += n_examples


def list_texts(indices: list[int]) -> list[list[int]]:
    """Return digits as token ids."""
    pixels = load_digits().data.astype(int)
    return [pixels[index].tolist() for index in indices]


def is_poisoned(job: Job, rank: int, step: int) -> bool:
    """Whether what a rank reads in a step is not finite."""
    return job.poison == (rank, step)
