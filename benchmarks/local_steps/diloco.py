"""DiLoCo (arXiv:2311.08105) on real hosts: local steps whose deltas are averaged in 32 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from distlion_lab.training.delta_votes import NESTEROV, PLAIN


class DiLoCo:
    """Local steps of an optimizer, then an outer step by the mean of all workers' deltas.

    Equation:
        every K-th step: d_i = x - y_i;  x' = outer SGD on (1 / N) sum_i d_i;  y_i' = x'

    Args:
        inner: The worker's optimizer, of parameters y_i that are equal on all workers.
        every: K.
        is_plain: An outer rate of 1, in place of Nesterov's momentum of 0.9 and a rate of 0.7.
    """

    def __init__(self, inner: Optimizer, *, every: int, is_plain: bool) -> None:
        self._inner, self._every, self._done = inner, every, 0
        self._params = [param for group in inner.param_groups for param in group["params"]]
        self._common = [param.detach().clone().requires_grad_() for param in self._params]
        outer = PLAIN if is_plain else NESTEROV
        self._outer = torch.optim.SGD(
            self._common, outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the inner optimizer."""
        return self._inner.param_groups

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Take a local step; every K-th time an outer step too."""
        self._inner.step()
        self._done += 1
        if self._done % self._every:
            return
        pairs = list(zip(self._params, self._common, strict=True))
        row = torch.cat([(common - param).flatten() for param, common in pairs])
        dist.all_reduce(row)
        row /= dist.get_world_size()
        means = row.split([param.numel() for param in self._params])
        for (_, common), mean in zip(pairs, means, strict=True):
            common.grad = mean.view_as(common)
        self._outer.step()
        for param, common in pairs:
            param.copy_(common)
