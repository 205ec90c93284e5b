"""torchtitan's Trainer, and the lines that change for one bit per parameter.

    torchrun --nproc-per-node 2 examples/06_torchtitan.py            # after: votes
    torchrun --nproc-per-node 2 examples/06_torchtitan.py --before   # before: HSDP and AdamW

Both train a small Llama to continue handwritten digits, given as sentences of 64 pixels and a
label, and resume from a checkpoint of their own if there is one. ``torchtitan_votes.py`` is a file
to copy. torchtitan imports Triton, on CPUs too: ``pip install triton``.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchtitan_compat  # noqa: F401, before all below; for torchtitan 0.3.0 on torch 2.13
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer
from torchtitan_votes import voting_lion  # 1

N_PIXELS, N_WORDS = 64, 17 + 10  # shades of gray, and labels


class DigitsLoader(BaseDataLoader):
    """Batches of digits, different for each replica."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any
    ) -> None:
        self.sentences = make_sentences()[:1500][dp_rank::dp_world_size]
        self.batch, self.generator = local_batch_size, torch.Generator().manual_seed(dp_rank)
        self.key = f"generator_{dp_rank}"  # one key each: all ranks save into one checkpoint

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            chosen = torch.randint(len(self.sentences), (self.batch,), generator=self.generator)
            sentences = self.sentences[chosen]
            yield {"input": sentences[:, :-1]}, sentences[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict[self.key])


class NoTokenizer(BaseTokenizer):
    """A stand-in for a tokenizer: digits are already numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return N_WORDS


def make_sentences() -> Tensor:
    """Return all digits: (1797, 65) int64, pixels below 17 and then the label."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data).long(), torch.tensor(digits.target)
    return torch.cat([pixels, labels[:, None] + 17], dim=1)


def make_model() -> ModelSpec:
    """Return torchtitan's Llama for tests, cut to two layers."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # sentences of one document, on any device
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def configure(args: argparse.Namespace) -> Trainer.Config:
    """Return the config that a registry of torchtitan would return."""
    if args.before:
        optimizer = default_adamw(lr=1e-3, weight_decay=0.1)
    else:
        optimizer = voting_lion(lr=5e-4, weight_decay=0.2, cautious=True)  # 2
    return Trainer.Config(
        model_spec=make_model(),
        optimizer=optimizer,
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=args.replicas,  # the workers that vote
            data_parallel_shard_degree=-1,  # the ranks of each worker
            spmd_backend="partial_dtensor",  # torchtitan 0.3.0 needs a later torch for others
        ),
        training=TrainingConfig(
            local_batch_size=16,
            seq_len=N_PIXELS,
            steps=args.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=args.save_every, last_save_model_only=False
        ),
        dataloader=DigitsLoader.Config(),
        tokenizer=NoTokenizer.Config(),
        loss=CrossEntropyLoss.Config(),
        metrics=MetricsProcessor.Config(log_freq=10),
        dump_folder=os.path.join(args.folder, "before" if args.before else "votes"),
    )


def main() -> None:
    """Train, and print the test loss."""
    init_logger()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", action="store_true", help="plain torchtitan, without votes")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--folder", default="runs/torchtitan", help="of checkpoints")
    args = parser.parse_args()
    trainer = configure(args).build()
    trainer.train()
    sentences = make_sentences()[1500:].to(trainer.device)
    with torch.no_grad():
        words = trainer.model_parts[0](sentences[:, :-1])
    loss = nn.functional.cross_entropy(words.flatten(0, 1).float(), sentences[:, 1:].flatten())
    if dist.get_rank() == 0:
        print(f"test loss {loss:.3f}")
        if not args.before:
            (optimizer,) = trainer.optimizers
            print(f"bytes sent in a step {optimizer.traffic.last_sent_bytes}")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
