"""Models with random weights, from transformers configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPT2Config,
    PreTrainedConfig,
    ViTConfig,
)

from distlion_lab.errors import DataError
from distlion_lab.json_file import read_json

# Any other name may be a kernel on the hub.
_LOCAL_ATTENTION = (None, "eager", "sdpa", "flex_attention")


def read_model_config(path: Path) -> PreTrainedConfig:
    """Read a transformers config, a JSON object with ``model_type``.

    Raises:
        DataError: The file cannot be read, is no config, or names an unknown model type.
    """
    try:
        fields: dict[str, Any] = read_json(path)
    except DataError as error:
        raise DataError(f"model config {str(path)!r} cannot be read: {error}") from error
    given = fields.get("model_type") if isinstance(fields, dict) else fields
    if type(given) is not str or given not in CONFIG_MAPPING:
        raise DataError(
            f"model config {str(path)!r}: expected a JSON object with a model_type that "
            f"transformers knows, such as 'gpt2' or 'vit'; got {str(given)[:80]!r}"
        )
    _refuse_code(path, fields)
    model_type = fields.pop("model_type")
    try:
        return CONFIG_MAPPING[model_type](**fields)
    # Each config class checks itself, with errors of its own.
    except Exception as error:
        raise DataError(f"model config {str(path)!r} is not valid: {error!r}") from error


def _refuse_code(path: Path, fields: dict[str, Any]) -> None:
    """Refuse fields that make transformers fetch and run code from the hub: modules, kernels."""
    if "auto_map" in fields:
        raise DataError(
            f"model config {str(path)!r} names code of its own (auto_map), which is never run; "
            "remove that field, or choose a model that transformers has"
        )
    for name in ("attn_implementation", "_attn_implementation"):
        if fields.get(name) not in _LOCAL_ATTENTION:
            raise DataError(
                f"model config {str(path)!r} has {name} {str(fields[name])[:80]!r}, which may be "
                "code from the hub, and that is never run; expected 'eager', 'sdpa' or "
                "'flex_attention'"
            )
    for value in fields.values():
        if isinstance(value, dict):
            _refuse_code(path, value)


def default_language_config(vocabulary_size: int, *, context: int) -> PreTrainedConfig:
    """Describe a GPT-2 of 0.4 million parameters for 256 bytes, 0.7 million for 2,048 words.

    Its initial weights are GPT-2's at this width: 0.02 sqrt(768 / 128).
    """
    return GPT2Config(
        vocab_size=vocabulary_size,
        n_positions=context,
        n_embd=128,
        n_layer=2,
        n_head=4,
        initializer_range=0.05,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def default_vision_config(*, image_size: int, channels: int, classes: int) -> PreTrainedConfig:
    """Describe a ViT that cuts an image into 4 x 4 patches (8 x 8 above 16 pixels)."""
    config = ViTConfig(
        image_size=image_size,
        patch_size=max(1, image_size // (4 if image_size <= 16 else 8)),
        num_channels=channels,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = classes
    return config


def build_language_model(config: PreTrainedConfig, *, seed: int) -> nn.Module:
    """Build a causal language model; its random weights depend on ``seed`` alone."""
    return _build(AutoModelForCausalLM, config, seed)


def build_vision_model(config: PreTrainedConfig, *, seed: int) -> nn.Module:
    """Build an image classifier; its random weights depend on ``seed`` alone."""
    return _build(AutoModelForImageClassification, config, seed)


def _build(factory: Any, config: PreTrainedConfig, seed: int) -> nn.Module:
    # transformers initializes from the global generator only: seed it, then restore its state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = factory.from_config(config)
        # Each layer checks its sizes, with errors of its own.
        except Exception as error:
            raise DataError(
                f"transformers cannot build this model from a config of type "
                f"{config.model_type!r}: {error!r}"
            ) from error
    return model.float().train()
