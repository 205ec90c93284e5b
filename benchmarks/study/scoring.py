"""How a model did on examples, whole and example by example."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Result:
    """The outcome of scoring.

    Attributes:
        loss: Mean cross entropy in nats per prediction.
        accuracy: Share of predictions that are right.
        units: What differences between methods are sampled over: 1 or 0 for each image (right or
            wrong); nats per byte for each block of text.
    """

    loss: float
    accuracy: float
    units: npt.NDArray[np.float64]


class ScoredTask(ABC):
    """A task that is scored on validation and test data."""

    def validate(self, model: nn.Module) -> Result:
        """Score on the data that rates are chosen by."""
        return self.conclude(*self.predict_validation(model))

    def test(self, model: nn.Module) -> Result:
        """Score on the data that are reported."""
        return self.conclude(*self.predict_test(model))

    @abstractmethod
    def predict_validation(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return losses and correctness on validation data, as ``predict``."""

    @abstractmethod
    def predict_test(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return losses and correctness on test data, as ``predict``."""

    @abstractmethod
    def conclude(self, losses: Tensor, right: Tensor) -> Result:
        """Score predictions."""


def predict(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return, for each prediction, its loss (n,) float32 and whether it is right (n,) bool."""
    was_training = model.training
    model.eval()
    losses, right = [], []
    with torch.inference_mode():
        for inputs, targets in batches:
            logits = model(inputs).flatten(0, -2).float()
            flat = targets.flatten()
            losses.append(F.cross_entropy(logits, flat, reduction="none"))
            right.append(logits.argmax(-1) == flat)
    model.train(was_training)
    return torch.cat(losses), torch.cat(right)


def pack_units(units: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return units as a few characters: bits where all are 0 or 1, else four digits each."""
    if set(np.unique(units)) <= {0.0, 1.0}:
        bits = np.packbits(units.astype(bool)).tobytes()
        return {"count": len(units), "bits": base64.b64encode(bits).decode()}
    return {"count": len(units), "values": [round(float(value), 5) for value in units]}


def unpack_units(packed: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Return what was packed, (count,)."""
    if "values" in packed:
        return np.array(packed["values"], np.float64)
    bits = np.frombuffer(base64.b64decode(packed["bits"]), np.uint8)
    return np.unpackbits(bits, count=packed["count"]).astype(np.float64)
