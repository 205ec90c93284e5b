"""GradDrop: send the largest entries, keep the rest for the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion_lab.baselines.base import CompressionStep, Payload, State
from distlion_lab.baselines.sparse import (
    SparseCompression,
    SparsePayload,
    check_fraction,
    count_kept,
)

MIN_SAMPLE_ELEMENTS = 1000
"""Smallest size of a sample: with ``keep`` 0.04, the kept fraction then has a standard deviation of
0.006. Parameters with at most this many elements are read as a whole."""


@dataclass(frozen=True)
class GradDrop(SparseCompression):
    """Send the entries above a threshold, and add the dropped ones to the next gradient.

    Equation:
        a = g + r;  sent = a where |a| >= T, else 0;  r' = a - sent
        (Sparse communication for distributed gradient descent, arXiv:1704.05021, Algorithm 1)
        r is the state's ``residual``. T is the upper ``keep`` quantile of |a|, one for each
        parameter, in a random sample of ``sample`` of the entries.

    Args:
        keep: Fraction of the entries to send, in (0, 1]; the paper's drop rate R is 1 - ``keep``.
        sample: Fraction of the entries from which to estimate T, in (0, 1], drawn with
            replacement. At least ``MIN_SAMPLE_ELEMENTS`` are drawn, or a smaller parameter is read
            as a whole.

    Raises:
        InvalidArgumentError: A fraction is out of its range.

    Notes:
        Entries that are exactly 0 are never sent, so T = 0 sends all nonzero entries. Entries equal
        to T are sent, and so is NaN. Payloads vary in length.
    """

    keep: float = 0.04
    sample: float = 0.001

    def __post_init__(self) -> None:
        check_fraction("GradDrop", "keep", self.keep)
        check_fraction("GradDrop", "sample", self.sample)

    @property
    def varies(self) -> bool:
        return True

    def create_state(self, n_elements: int, device: torch.device) -> State:
        return {"residual": torch.zeros(n_elements, dtype=torch.float32, device=device)}

    def compress(self, grad: Tensor, state: State, at: CompressionStep) -> tuple[Payload, State]:
        accumulated = grad + state["residual"]
        sizes = accumulated.abs()
        threshold = self._estimate_threshold(sizes, at.generator)
        # Not `>=`, which is False for NaN: a NaN must not stay in the residual.
        chosen = ~(sizes < threshold) & (sizes != 0)
        payload = SparsePayload.pick(accumulated, chosen.nonzero().squeeze(1))
        return payload, {"residual": accumulated.masked_fill_(chosen, 0.0)}

    def _estimate_threshold(self, sizes: Tensor, generator: torch.Generator) -> Tensor:
        n_elements = sizes.numel()
        n_sample = max(MIN_SAMPLE_ELEMENTS, math.ceil(self.sample * n_elements))
        if n_sample < n_elements:
            where = torch.randint(n_elements, (n_sample,), generator=generator, device=sizes.device)
            sizes = sizes[where]
        return sizes.topk(count_kept(sizes.numel(), self.keep)).values[-1]
