"""Cautious votes whose mask is applied where votes are counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from feedback import draw_signs
from schedule import Run
from torch import Tensor, nn

from distlion_lab.tasks.base import seeded_generator

_COINS = 0x6D61736B


class MaskedVote:
    """Workers that vote on their direction and on their gradient, and a counter that compares.

    Equation:
        c_i = beta1 m_i + (1 - beta1) g_i;  m_i' = beta2 m_i + (1 - beta2) g_i
        S = sum_i sign(c_i);  G = sum_i sign(g_i)
        x' = (1 - lr wd) x - lr sign(S) [S G > 0]
        (the mask of Cautious Optimizers, arXiv:2411.16085, on majorities instead of on one worker)

    A worker sends two bits an element; a sign of exactly 0 takes a random bit. Elements where the
    two majorities differ, or where one of them is a tie, stay. So the reply has three values, two
    bits. With ``coin`` these elements move at random instead, and the reply has one bit.

    Args:
        params: Of the model.
        run: Rate, workers, steps and seed.
        betas: (beta1, beta2).
        coin: Whether elements that would stay move by lr or -lr, as a random bit says.
    """

    up_bits_per_parameter = 2.0

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        run: Run,
        *,
        betas: tuple[float, float],
        coin: bool = False,
    ) -> None:
        self._params, self._run, self._betas, self._coin = params, run, betas, coin
        self._momenta = [_zeros_like(params) for _ in range(run.workers)]
        self._directions, self._gradients = _zeros_like(params), _zeros_like(params)
        self._done = 0
        # It moves by lr times the masked majority; the decay is done before.
        self.optimizer = torch.optim.SGD(params, run.lr)

    @property
    def down_bits_per_parameter(self) -> float:
        return 1.0 if self._coin else 2.0

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        first, second = self._betas
        coins = seeded_generator(_COINS, self._run.seed, self._done, worker)
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            momentum = self._momenta[worker][index]
            direction = first * momentum + (1 - first) * param.grad
            self._directions[index] += draw_signs(direction, coins)
            self._gradients[index] += draw_signs(param.grad, coins)
            momentum.mul_(second).add_(param.grad, alpha=1 - second)
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        # Decay follows the rate, and takes its share of a weight at the highest.
        kept = 1 - self._run.decay * float(self.optimizer.param_groups[0]["lr"]) / self._run.lr
        coins = seeded_generator(_COINS, self._run.seed, self._done, self._run.workers)
        counted = zip(self._params, self._directions, self._gradients, strict=True)
        for param, directions, gradients in counted:
            param.mul_(kept)
            param.grad = directions.sign() * (directions * gradients > 0)
            if self._coin:
                param.grad = draw_signs(param.grad, coins)
            directions.zero_()
            gradients.zero_()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._done += 1


def _zeros_like(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(param) for param in params]
