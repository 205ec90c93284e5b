"""1-bit Adam: a rival that also sends one bit, after a warm-up in full precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from schedule import WARM_UP_SHARE, Run
from torch import Tensor, nn

BETAS = (0.9, 0.999)
EPS = 1e-8
_SCALE_BITS = 32
_FULL_BITS = 32


class OneBitAdam:
    """AdamW on the mean gradient, then momenta that travel as signs with error feedback.

    Equation:
        warm-up: AdamW on the mean gradient; v stays as it is afterwards, corrected for its bias.
        m_i = beta1 m + (1 - beta1) g_i;  q_i = C(m_i + e_i);  e_i' = m_i + e_i - q_i
        m' = C(mean_i q_i + e);  e' = mean_i q_i + e - m'
        x' = (1 - lr wd) x - lr m' / (sqrt(v) + eps);  C(y) = |y|_2 / sqrt(n) sign(y)
        (1-bit Adam, arXiv:2102.02888, with decoupled decay)

    The warm-up has the length of the schedule's, a fifth of the run, and sends 32 bits each way.

    Args:
        params: Of the model.
        run: Rate, workers, steps and seed.
    """

    def __init__(self, params: Sequence[nn.Parameter], run: Run) -> None:
        self._params, self._run = params, run
        self._warm_up = max(1, round(WARM_UP_SHARE * run.steps))
        self._done = 0
        self._first, self._second = _zeros_like(params), _zeros_like(params)
        self._sums = _zeros_like(params)
        self._errors = [_zeros_like(params) for _ in range(run.workers)]
        self._server_errors = _zeros_like(params)
        # It moves by lr times what is in the place of the gradient; the decay is done before.
        self.optimizer = torch.optim.SGD(params, run.lr)

    @property
    def up_bits_per_parameter(self) -> float:
        elements = sum(param.numel() for param in self._params)
        share = min(1.0, self._warm_up / self._run.steps)
        return share * _FULL_BITS + (1 - share) * (1 + _SCALE_BITS * len(self._params) / elements)

    @property
    def down_bits_per_parameter(self) -> float:
        return self.up_bits_per_parameter

    @property
    def _is_warming_up(self) -> bool:
        return self._done < self._warm_up

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            sent = param.grad
            if not self._is_warming_up:
                rest = self._first[index] * BETAS[0] + (1 - BETAS[0]) * param.grad
                rest += self._errors[worker][index]
                sent = _compress(rest)
                self._errors[worker][index] = rest - sent
            self._sums[index] += sent / self._run.workers
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        # Decay follows the rate, and takes its share of a weight at the highest.
        kept = 1 - self._run.decay * float(self.optimizer.param_groups[0]["lr"]) / self._run.lr
        warm_steps = min(self._done + 1, self._warm_up)
        for index, param in enumerate(self._params):
            first = self._take_mean(index)
            root = (self._second[index] / (1 - BETAS[1] ** warm_steps)).sqrt() + EPS
            param.mul_(kept)
            param.grad = first / root
            self._sums[index].zero_()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._done += 1

    def _take_mean(self, index: int) -> Tensor:
        """Move the first moment by what the workers sent; return it, corrected for its bias."""
        mean, first = self._sums[index], self._first[index]
        if self._is_warming_up:
            first.mul_(BETAS[0]).add_(mean, alpha=1 - BETAS[0])
            self._second[index].mul_(BETAS[1]).addcmul_(mean, mean, value=1 - BETAS[1])
        else:
            rest = mean + self._server_errors[index]
            first.copy_(_compress(rest))
            self._server_errors[index] = rest - first
        return first / (1 - BETAS[0] ** (self._done + 1))


def _compress(values: Tensor) -> Tensor:
    """Return signs with one scale a tensor, of the norm of ``values``; 0 counts as plus."""
    scale = values.norm() / values.numel() ** 0.5
    return scale * torch.where(values < 0, -1.0, 1.0)


def _zeros_like(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(param) for param in params]
