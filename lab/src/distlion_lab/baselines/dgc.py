"""Deep Gradient Compression: the largest entries of an accumulated, momentum-corrected gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion_lab.baselines.base import CompressionStep, Payload, State
from distlion_lab.baselines.sparse import (
    SparseCompression,
    SparsePayload,
    check_fraction,
    count_kept,
)

_WARMUP_FRACTIONS = (1 / 4, 1 / 16, 1 / 64, 1 / 256)


@dataclass(frozen=True)
class DeepGradientCompression(SparseCompression):
    """Accumulate momentum, not gradients, and send the largest accumulated entries.

    Equation:
        g' = g * min(1, C sqrt(N) / |g|);  u = m u + g';  v = v + u
        sent = the k largest |v|, k = keep_t * n;  u = v = 0 where sent
        keep_t = max(keep, 1/4, 1/16, 1/64, 1/256 in the quarters of the warm-up), then keep
        (Deep Gradient Compression, arXiv:1712.01887, Algorithm 4 and section 3.3)
        m is ``momentum``, C is ``clip_norm``, |g| is the norm of one parameter's gradient; u and v
        are the state's ``velocity`` and ``accumulated``.

    Args:
        keep: Fraction of the entries to send, in (0, 1]; the paper's sparsity is 1 - ``keep``.
        momentum: Momentum, in [0, 1).
        clip_norm: Norm at which to clip a parameter's mean gradient, above 0. None: never. N
            independent gradients with a mean of that norm are sqrt(N) times as long.
        warmup_steps: Steps in which the sparsity rises, at least 0; the paper has 4 epochs.

    Raises:
        InvalidArgumentError: A number is out of its range.
        UnsupportedTypeError: ``warmup_steps`` is not an integer.

    Notes:
        The momentum is part of the method: feed the mean to SGD without momentum.
        The paper's G_k is a worker's gradient over N, clipped at C / sqrt(N): the same bound.
        The paper clips by the norm of all gradients. This method clips each parameter by its own
        norm, because DDP exchanges the last layers before the first layers' gradients exist.
        The k largest are exact, at least one; ``torch.topk`` chooses among equal ones.
        There is no Nesterov momentum.
    """

    keep: float = 0.04
    momentum: float = 0.9
    clip_norm: float | None = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_fraction(owner, "keep", self.keep)
        if not 0 <= self.momentum < 1:
            raise InvalidArgumentError(
                f"{owner}(momentum={self.momentum}): expected a number in [0, 1)"
            )
        if self.clip_norm is not None and not (
            math.isfinite(self.clip_norm) and self.clip_norm > 0
        ):
            raise InvalidArgumentError(
                f"{owner}(clip_norm={self.clip_norm}): expected a finite number above 0, or None"
            )
        if not isinstance(self.warmup_steps, int) or isinstance(self.warmup_steps, bool):
            raise UnsupportedTypeError(
                f"{owner}(warmup_steps={self.warmup_steps!r}): expected an integer"
            )
        if self.warmup_steps < 0:
            raise InvalidArgumentError(
                f"{owner}(warmup_steps={self.warmup_steps}): expected 0 or more"
            )

    def kept_fraction(self, step: int) -> float:
        """Return the fraction to send at a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.keep
        stage = len(_WARMUP_FRACTIONS) * step // self.warmup_steps
        return max(self.keep, _WARMUP_FRACTIONS[stage])

    def create_state(self, n_elements: int, device: torch.device) -> State:
        return {
            "velocity": torch.zeros(n_elements, dtype=torch.float32, device=device),
            "accumulated": torch.zeros(n_elements, dtype=torch.float32, device=device),
        }

    def compress(self, grad: Tensor, state: State, at: CompressionStep) -> tuple[Payload, State]:
        velocity = self.momentum * state["velocity"] + self._clip(grad, at.n_workers)
        accumulated = state["accumulated"] + velocity
        kept = count_kept(grad.numel(), self.kept_fraction(at.step))
        largest = accumulated.abs().topk(kept, sorted=False).indices.sort().values
        payload = SparsePayload.pick(accumulated, largest)
        velocity.index_fill_(0, largest, 0.0)
        accumulated.index_fill_(0, largest, 0.0)
        return payload, {"velocity": velocity, "accumulated": accumulated}

    def _clip(self, grad: Tensor, n_workers: int) -> Tensor:
        if self.clip_norm is None:
            return grad
        norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
        factor: Tensor = (self.clip_norm * math.sqrt(n_workers) / norm).clamp(max=1.0)
        return grad * factor.float()
