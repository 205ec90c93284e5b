"""Majority votes that differ from Distributed Lion's with betas (0.9, 0.95) in one thing each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from schedule import DECAY_PER_STEP, WARM_UP_SHARE, Run, rate_factor
from torch import Tensor, nn

from distlion.kernels import matrix_shape, orthogonalize
from distlion.virtual import VirtualCluster
from distlion.votes import RULES
from distlion_lab.tasks.base import seeded_generator
from distlion_lab.training.workers import LION_BETAS

_NOISE = 0x6E6F6973


@dataclass(frozen=True)
class Variant:
    """What is different; the defaults are Distributed Lion with shorter momenta.

    Attributes:
        betas: (beta1, beta2) of the workers' momenta.
        shared_beta: Weight of a momentum that all workers keep of the outcomes, behind the vote.
        momentum_dtype: What the workers' momenta are rounded to after each step.
        noise: A worker votes by the sign of c + u, u uniform up to so many times its mean abs(c) of
            the tensor: plus with probability (1 + c / largest u) / 2.
        scale: What the step of a tensor is multiplied with, 1 on average over all elements:
            "none", 1; "votes", the mean over workers of mean abs(c), which would travel in the
            header; "weights", the root mean square of a matrix, and of a vector nothing.
        decay: How many times the weights decay as much as in all other methods.
        warm_up_share: Of the run, in which the rate rises.
        orthogonalize_every: Directions of hidden matrices are orthogonalized in each so many steps,
            and others are cautious; 0 for neither.
        between: What a matrix votes on in other steps: "stale", the direction that was
            orthogonalized last; "lion", the direction as it is.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    shared_beta: float = 0.0
    momentum_dtype: torch.dtype = torch.float32
    noise: float = 0.0
    scale: Literal["none", "votes", "weights"] = "none"
    decay: float = 1.0
    warm_up_share: float = WARM_UP_SHARE
    orthogonalize_every: int = 0
    between: Literal["stale", "lion"] = "stale"


VARIANTS = {
    f"majority-{name}-betas-90-95": variant
    for name, variant in {
        "momentum-bf16": Variant(momentum_dtype=torch.bfloat16),
        "stochastic-sign": Variant(noise=2.0),
        "tensor-scale": Variant(scale="votes"),
        "layer-rates": Variant(scale="weights"),
        "decay-0": Variant(decay=0.0),
        "decay-4": Variant(decay=4.0),
        "warm-up-5": Variant(warm_up_share=0.05),
        "orthogonal-each-1": Variant(orthogonalize_every=1),
        "orthogonal-each-2-stale": Variant(orthogonalize_every=2),
        "orthogonal-each-2-lion": Variant(orthogonalize_every=2, between="lion"),
        "orthogonal-each-4-lion": Variant(orthogonalize_every=4, between="lion"),
    }.items()
}
LOCAL_THEN_SHARED = "majority-local-50-shared-90"
VARIANTS[LOCAL_THEN_SHARED] = Variant(betas=(0.5, 0.5), shared_beta=0.9)
STOCHASTIC = {
    "majority-stochastic-sign": Variant(betas=LION_BETAS, noise=2.0),
    "majority-stochastic-sign-wide": Variant(betas=LION_BETAS, noise=8.0),
}
"""With Lion's momenta: for workers whose data differ."""


class VariantVote:
    """Workers with momenta of their own, and a majority vote over what a variant makes of them.

    Equation:
        c_i = beta1 m_i + (1 - beta1) g_i;  m_i' = beta2 m_i + (1 - beta2) g_i
        S = sign(sum of sign(c_i + u_i));  y' = b y + (1 - b) S;  x' = (1 - lr wd) x - lr s y'

    The votes are those of ``VirtualCluster`` without momenta, on parameters that stand in for the
    model's: they begin a step at 0 with a rate of 1 and therefore end it at -S.

    Args:
        params: Of the model.
        run: Rate, workers, steps and seed.
        variant: What is different.
        matrices: Numbers of the hidden weight matrices.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        run: Run,
        variant: Variant,
        matrices: Collection[int] = (),
    ) -> None:
        self._params, self._run, self._variant = params, run, variant
        self._matrices = matrices
        self._stale: dict[tuple[int, int], Tensor] = {}
        self._done = 0
        self._momenta = [
            [torch.zeros_like(param, dtype=variant.momentum_dtype) for param in params]
            for _ in range(run.workers)
        ]
        self._shared = [torch.zeros_like(param) for param in params]
        self._sizes = torch.zeros(len(params))
        self._outcomes = [nn.Parameter(torch.zeros_like(param).contiguous()) for param in params]
        self._votes = VirtualCluster(
            self._outcomes,
            1.0,
            (0.0, 0.0),
            workers=run.workers,
            aggregation=RULES["majority"].rule,
            seed=run.seed,
        )
        self.optimizer = torch.optim.SGD(params, run.lr)

    @property
    def up_bits_per_parameter(self) -> float:
        return self._votes.up_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self._votes.down_bits_per_parameter

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        first, second = self._variant.betas
        draws = seeded_generator(_NOISE, self._run.seed, self._done, worker)
        for index, (param, outcome) in enumerate(zip(self._params, self._outcomes, strict=True)):
            outcome.grad = None
            if param.grad is None:
                continue
            momentum = self._momenta[worker][index]
            before = momentum.float()
            direction = first * before + (1 - first) * param.grad
            momentum.copy_(second * before + (1 - second) * param.grad)
            if self._variant.orthogonalize_every:
                direction = self._redirect(direction, param.grad, worker, index)
            size = direction.abs().mean()
            self._sizes[index] += size / self._run.workers
            if self._variant.noise:
                width = self._variant.noise * size
                direction += width * (2 * torch.rand(param.shape, generator=draws) - 1)
            outcome.grad = direction.contiguous()
            param.grad = None
        self._votes.collect(worker)

    def _redirect(self, direction: Tensor, grad: Tensor, worker: int, index: int) -> Tensor:
        """Return what a worker votes on, for hidden matrices and for all other parameters."""
        if index not in self._matrices:
            return torch.where(direction * grad > 0, direction, 0.0)
        if self._done % self._variant.orthogonalize_every == 0:
            shape = matrix_shape(direction.shape)
            assert shape is not None  # it is a matrix
            self._stale[worker, index] = orthogonalize(direction.reshape(shape)).view_as(direction)
        elif self._variant.between == "lion":
            return direction
        return self._stale[worker, index].clone()

    @torch.no_grad()
    def step(self) -> None:
        self._votes.step()
        (group,) = self.optimizer.param_groups
        beta, scales = self._variant.shared_beta, self._list_scales()
        lr = float(group["lr"]) * self._correct_warm_up()
        # Decay follows the rate, and takes DECAY_PER_STEP of a weight at the highest.
        kept = 1 - self._variant.decay * DECAY_PER_STEP * lr / self._run.lr
        for index, (param, outcome) in enumerate(zip(self._params, self._outcomes, strict=True)):
            self._shared[index].mul_(beta).sub_(outcome, alpha=1 - beta)
            param.mul_(kept).sub_(self._shared[index], alpha=lr * scales[index])
            outcome.zero_()
        self._sizes.zero_()
        self._done += 1

    def _correct_warm_up(self) -> float:
        """Return what the rate of the schedule is multiplied with, for another warm-up."""
        done, steps, share = self._done, self._run.steps, self._variant.warm_up_share
        return rate_factor(done, steps, share) / rate_factor(done, steps)

    def _list_scales(self) -> list[float]:
        """Return what the step of each tensor is multiplied with."""
        counts = torch.tensor([float(param.numel()) for param in self._params])
        sizes = torch.ones(len(counts))
        if self._variant.scale == "votes":
            sizes = self._sizes.clone()
        elif self._variant.scale == "weights":
            matrices = torch.tensor([param.ndim > 1 for param in self._params])
            norms = torch.stack([param.square().mean().sqrt() for param in self._params])
            mean = (norms * counts)[matrices].sum() / counts[matrices].sum()
            sizes = torch.where(matrices, norms, mean)
        return (sizes * counts.sum() / (sizes * counts).sum()).tolist()
