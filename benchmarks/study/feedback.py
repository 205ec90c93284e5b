"""Votes with error feedback: each worker votes on what the others do not know of its direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from schedule import DECAY_PER_STEP, Run
from torch import Tensor, nn

from distlion_lab.tasks.base import seeded_generator

_COINS = 0x66656564
_SCALE_BITS = 32


class FeedbackVote:
    """Workers that vote on the rest of their direction, and a sum of what all votes have said.

    Equation:
        c_i = beta1 m_i + (1 - beta1) g_i;  m_i' = beta2 m_i + (1 - beta2) g_i
        q_i = what p bits say of c_i - h_i;  h_i' = h_i + q_i;  H' = H + sum_i q_i
        x' = (1 - lr wd) x - lr sign(H')
        one bit: q_i = a_i sign(c_i - h_i), a_i = mean over the tensor of abs(c_i - h_i)
        two bits: the second says whether abs(c_i - h_i) is a_i or more; in place of a_i stands the
            mean of those that it says the same of
        (EF21, arXiv:2106.05203, with scaled signs for its compressor, on Lion's directions)

    h_i is what votes have said of c_i so far. Worker i keeps it; H, its sum over workers, is kept
    where votes are counted. So a worker sends p bits an element and p numbers a tensor, and gets
    back a bit. What is exactly 0 takes a coin: of the worker for c_i - h_i, of all for H'.

    Args:
        params: Of the model.
        run: Rate, workers, steps and seed.
        betas: (beta1, beta2).
        bits: p, 1 or 2.
    """

    down_bits_per_parameter = 1.0

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        run: Run,
        *,
        betas: tuple[float, float],
        bits: int,
    ) -> None:
        self._params, self._run, self._betas, self._bits = params, run, betas, bits
        self._momenta = [_zeros_like(params) for _ in range(run.workers)]
        self._said = [_zeros_like(params) for _ in range(run.workers)]
        self._sums = _zeros_like(params)
        self._done = 0
        # It moves by lr sign(H'); the decay is done before.
        self.optimizer = torch.optim.SGD(params, run.lr)

    @property
    def up_bits_per_parameter(self) -> float:
        elements = sum(param.numel() for param in self._params)
        return self._bits * (1 + _SCALE_BITS * len(self._params) / elements)

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        first, second = self._betas
        coins = seeded_generator(_COINS, self._run.seed, self._done, worker)
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            momentum, said = self._momenta[worker][index], self._said[worker][index]
            rest = first * momentum + (1 - first) * param.grad - said
            momentum.mul_(second).add_(param.grad, alpha=1 - second)
            step = _find_sizes(rest, self._bits) * draw_signs(rest, coins)
            said += step
            self._sums[index] += step
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        coins = seeded_generator(_COINS, self._run.seed, self._done, self._run.workers)
        # Decay follows the rate, and takes DECAY_PER_STEP of a weight at the highest.
        kept = 1 - DECAY_PER_STEP * float(self.optimizer.param_groups[0]["lr"]) / self._run.lr
        for param, total in zip(self._params, self._sums, strict=True):
            param.mul_(kept)
            param.grad = draw_signs(total, coins)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._done += 1


def _zeros_like(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(param) for param in params]


def _find_sizes(rest: Tensor, bits: int) -> Tensor:
    """Return the size that a vote says of each element; one for all where it is a bit."""
    sizes = rest.abs()
    mean = sizes.mean()
    if bits == 1:
        return mean
    is_large = sizes >= mean
    n_large = is_large.sum()
    large = sizes.where(is_large, 0).sum() / n_large.clamp(min=1)
    small = sizes.where(~is_large, 0).sum() / (sizes.numel() - n_large).clamp(min=1)
    return large.where(is_large, small)


def draw_signs(values: Tensor, coins: torch.Generator) -> Tensor:
    """Return 1 or -1 for each element, by a coin where it is 0."""
    signs = values.sign()
    zeros = signs == 0
    if not zeros.any():
        return signs
    return signs.where(~zeros, 2.0 * torch.randint(2, values.shape, generator=coins) - 1)
