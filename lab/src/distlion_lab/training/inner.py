"""Optimizers that step on one gradient, such as the workers' mean or a worker's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from distlion.optim import Lion
from distlion_lab.baselines.muon import MOMENTUM, MuonWithAdamW
from distlion_lab.training.workers import LION_BETAS, MethodRun

# Small sweeps of one seed, in studies/lab-notebook.md.
LION_LR = 5e-4
LION_WEIGHT_DECAY = 0.1
ADAMW_BETAS = (0.9, 0.999)
SGD_MOMENTUM = 0.9
# DiLoCo's choice (arXiv:2311.08105), for votes too: only the exchange differs.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9

# Centers of grids, from one run each of 60 steps on the digits with 4 workers, 5 learning rates a
# factor of 3 apart. AdamW needs a larger one on noisy means than on exact ones.
_ADAMW_LR = 1e-3
_NOISY_ADAMW_LR = 3e-3
_MOMENTUM_SGD_LR = 0.01
_PLAIN_SGD_LR = 0.03
# Default of `distlion train`, from small sweeps of one seed.
_TRAIN_SGD_LR = 0.1
# Per step the weights then shrink as much as Lion's: lr * weight_decay is the same.
_SGD_WEIGHT_DECAY = 5e-4


@dataclass(frozen=True)
class Inner:
    """An optimizer without workers, and the center of its tuning.

    Attributes:
        name: The optimizer with its settings.
        make: Builds it over the parameters of a run.
        base_lr: Center of its grid of learning rates.
        weight_decay: Default weight decay.
    """

    name: str
    make: Callable[[MethodRun], torch.optim.Optimizer]
    base_lr: float
    weight_decay: float


def choose_lion(
    betas: tuple[float, float], *, cautious: bool = False, orthogonalize: bool = False
) -> Inner:
    """Return Lion with these betas.

    Args:
        betas: Its betas.
        cautious: Whether it masks its updates.
        orthogonalize: Whether it orthogonalizes hidden matrices and masks all other updates.
    """

    def make(run: MethodRun) -> torch.optim.Optimizer:
        decay = run.weight_decay
        params = run.group(orthogonalize=orthogonalize)
        return Lion(params, run.lr, betas, weight_decay=decay, cautious=cautious)

    how = ", cautious=True" if cautious else ""
    how = ", orthogonalized matrices, others cautious" if orthogonalize else how
    name = f"Lion(betas={betas}{how})"
    return Inner(name, make, LION_LR, LION_WEIGHT_DECAY)


def choose_adamw(betas: tuple[float, float]) -> Inner:
    """Return AdamW with these betas."""

    def make(run: MethodRun) -> torch.optim.Optimizer:
        params = [param for _, param in run.params]
        return torch.optim.AdamW(params, run.lr, betas, weight_decay=run.weight_decay)

    return Inner(f"AdamW(betas={betas})", make, _ADAMW_LR, LION_WEIGHT_DECAY)


def choose_muon(betas: tuple[float, float]) -> Inner:
    """Return Muon for hidden matrices, and AdamW with these betas for all others."""

    def make(run: MethodRun) -> torch.optim.Optimizer:
        groups = run.group(orthogonalize=True)
        return MuonWithAdamW(groups, run.lr, betas, weight_decay=run.weight_decay)

    name = f"Muon(momentum={MOMENTUM}) and AdamW(betas={betas})"
    return Inner(name, make, _ADAMW_LR, LION_WEIGHT_DECAY)


def _make_sgd(run: MethodRun, *, momentum: float) -> torch.optim.Optimizer:
    params = [param for _, param in run.params]
    return torch.optim.SGD(params, run.lr, momentum=momentum, weight_decay=run.weight_decay)


def _make_outer_sgd(run: MethodRun, *, lr: float, momentum: float) -> torch.optim.Optimizer:
    params = [param for _, param in run.params]
    return torch.optim.SGD(params, lr, momentum=momentum, nesterov=momentum > 0)


LION, ADAMW = choose_lion(LION_BETAS), choose_adamw(ADAMW_BETAS)
MUON = choose_muon(ADAMW_BETAS)
NOISY_ADAMW = replace(ADAMW, base_lr=_NOISY_ADAMW_LR)
MOMENTUM_SGD = Inner(
    f"SGD(momentum={SGD_MOMENTUM})",
    partial(_make_sgd, momentum=SGD_MOMENTUM),
    _MOMENTUM_SGD_LR,
    _SGD_WEIGHT_DECAY,
)
PLAIN_SGD = Inner("SGD()", partial(_make_sgd, momentum=0.0), _PLAIN_SGD_LR, _SGD_WEIGHT_DECAY)
TRAIN_SGD = replace(PLAIN_SGD, base_lr=_TRAIN_SGD_LR)
OUTER_SGD = Inner(
    f"SGD(lr={OUTER_LR}, momentum={OUTER_MOMENTUM}, nesterov=True)",
    partial(_make_outer_sgd, lr=OUTER_LR, momentum=OUTER_MOMENTUM),
    OUTER_LR,
    0.0,
)
# For means: the workers' parameters are averaged.
PLAIN_OUTER_SGD = Inner("SGD(lr=1.0)", partial(_make_outer_sgd, lr=1.0, momentum=0.0), 1.0, 0.0)
