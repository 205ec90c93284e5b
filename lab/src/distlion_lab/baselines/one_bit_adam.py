"""1-bit Adam: AdamW in full precision, then momenta sent as signs with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.ring import FLOAT32_BYTES, ring_all_reduce_bytes

BETAS = (0.9, 0.999)
EPS = 1e-8
WARM_UP_SHARE = 0.2
"""Share of a run with steps in full precision."""


class OneBitAdam:
    """N workers of 1-bit Adam that take turns with one set of parameters.

    Equation:
        warm-up: AdamW on the mean gradient; v stays as it is afterwards, corrected for its bias.
        m_i = beta1 m + (1 - beta1) g_i;  q_i = C(m_i + e_i);  e_i' = m_i + e_i - q_i
        m' = C(mean_i q_i + e);  e' = mean_i q_i + e - m'
        x' = (1 - decay * lr / highest lr) x - lr m' / (sqrt(v) + eps)
        C(y) = |y|_2 / sqrt(n) sign(y)
        (1-bit Adam, arXiv:2102.02888, with decoupled decay)

    Args:
        params: Parameters of the model.
        lr: Highest learning rate of the schedule.
        decay: Share of its value that a weight loses in a step at the highest rate.
        workers: N, at least 1.
        steps: Steps of the whole run. The first fifth warms up and sends 32 bits each way.

    Attributes:
        optimizer: Optimizer with the learning rate of the next step.
        rounds: Number of sequential messages in a step.

    Raises:
        InvalidArgumentError: ``workers`` is less than 1.

    Notes:
        The sum of the workers' votes has one scale for each parameter, as from a single server. The
        bytes are counted for a server that is divided among all workers.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        lr: float,
        decay: float,
        workers: int,
        steps: int,
    ) -> None:
        if workers < 1:
            raise InvalidArgumentError(f"workers is {workers}; expected 1 or more")
        self._params, self._n_workers, self._n_steps = params, workers, steps
        self._lr, self._decay = lr, decay
        self._warm_up = max(1, round(WARM_UP_SHARE * steps))
        self._done = 0
        self._first, self._second = _zeros_like(params), _zeros_like(params)
        self._sums = _zeros_like(params)
        self._errors = [_zeros_like(params) for _ in range(workers)]
        self._server_errors = _zeros_like(params)
        self.rounds = 0 if workers == 1 else 2 * math.ceil(math.log2(workers))
        # It moves by lr times the value in ``p.grad``; the decay is done before.
        self.optimizer = torch.optim.SGD(params, lr)

    @property
    def up_bits_per_parameter(self) -> float:
        """Bits that a worker sends to a server, the mean over the whole run."""
        share = min(1.0, self._warm_up / self._n_steps)
        n_elements = sum(param.numel() for param in self._params)
        whole, signs = count_step_bytes(self._params)
        return 8 * (share * whole + (1 - share) * signs) / n_elements

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits that the server sends to each worker: as many as the worker sends."""
        return self.up_bits_per_parameter

    @property
    def sent_bytes(self) -> int:
        """Bytes that each worker would have sent in all steps so far."""
        whole, signs = (
            ring_all_reduce_bytes(each, self._n_workers, element_bytes=1)
            for each in count_step_bytes(self._params)
        )
        warm = min(self._done, self._warm_up)
        return warm * whole + (self._done - warm) * signs

    @property
    def _is_warming_up(self) -> bool:
        return self._done < self._warm_up

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it."""
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            sent = param.grad
            if not self._is_warming_up:
                rest = self._first[index] * BETAS[0] + (1 - BETAS[0]) * param.grad
                rest += self._errors[worker][index]
                sent = compress_signs(rest)
                self._errors[worker][index] = rest - sent
            self._sums[index] += sent / self._n_workers
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters."""
        # Decay follows the rate, and takes its full share at the highest.
        kept = 1 - self._decay * float(self.optimizer.param_groups[0]["lr"]) / self._lr
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
        """Move the first moment by the workers' mean; return it, corrected for its bias."""
        mean, first = self._sums[index], self._first[index]
        if self._is_warming_up:
            first.mul_(BETAS[0]).add_(mean, alpha=1 - BETAS[0])
            self._second[index].mul_(BETAS[1]).addcmul_(mean, mean, value=1 - BETAS[1])
        else:
            rest = mean + self._server_errors[index]
            first.copy_(compress_signs(rest))
            self._server_errors[index] = rest - first
        return first / (1 - BETAS[0] ** (self._done + 1))


def count_step_bytes(params: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes of a gradient in float32, and of its signs with a scale per parameter."""
    sizes = [param.numel() for param in params]
    return FLOAT32_BYTES * sum(sizes), sum(-(-size // 8) + FLOAT32_BYTES for size in sizes)


def compress_signs(values: Tensor) -> Tensor:
    """Return signs scaled to the norm of ``values``, any shape; 0 counts as plus."""
    scale: Tensor = values.norm() / values.numel() ** 0.5
    return scale * torch.where(values < 0, -1.0, 1.0)


def _zeros_like(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(param) for param in params]
