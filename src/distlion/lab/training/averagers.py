"""Methods that average gradients, compressed or not, and hand the mean to one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from distlion.lab.baselines import (
    Compression,
    DeepGradientCompression,
    GradDrop,
    HalfPrecision,
    PowerSGD,
    TernGrad,
    VirtualBaseline,
)
from distlion.lab.training.contender import Contender, MethodKind
from distlion.lab.training.virtual_method import Entry, VirtualAveraging
from distlion.lab.training.vote_names import (
    ADAMW_BETAS,
    LION_BETAS,
    MEANS_WITH_BETAS,
    describe_variant,
    split_betas,
    split_cautious,
)
from distlion.lab.training.voters import LION_LR, LION_WEIGHT_DECAY
from distlion.optim import Lion

# Centers of grids, from one run each of 60 steps on the digits with 4 workers, 5 learning rates a
# factor of 3 apart. Noisy means want a larger one of AdamW than exact ones do.
_ADAMW_LR = 1e-3
_NOISY_ADAMW_LR = 3e-3
_MOMENTUM_SGD_LR = 0.01
_PLAIN_SGD_LR = 0.03
_SGD_WEIGHT_DECAY = 5e-4
_SGD_MOMENTUM = 0.9
# The comparison of arXiv:2404.00438 keeps 4 % of the entries.
_KEPT = 0.04
_Method = Compression | PowerSGD
# Of the run, in place of 4 epochs of the paper's 90 or more.
_WARM_UP_SHARE = 0.05


@dataclass(frozen=True)
class Inner:
    """The optimizer that the mean gradient is handed to, and the center of its tuning."""

    name: str
    make: Callable[[Entry], torch.optim.Optimizer]
    base_lr: float
    weight_decay: float


def _make_lion(
    entry: Entry, *, betas: tuple[float, float], cautious: bool
) -> torch.optim.Optimizer:
    decay = entry.weight_decay
    return Lion(entry.params, entry.lr, betas, weight_decay=decay, cautious=cautious)


def _make_adamw(entry: Entry, *, betas: tuple[float, float]) -> torch.optim.Optimizer:
    params = [param for _, param in entry.params]
    return torch.optim.AdamW(params, entry.lr, betas, weight_decay=entry.weight_decay)


def _choose_lion(betas: tuple[float, float], *, cautious: bool = False) -> Inner:
    make = partial(_make_lion, betas=betas, cautious=cautious)
    name = f"Lion(betas={betas}{', cautious=True' if cautious else ''})"
    return Inner(name, make, LION_LR, LION_WEIGHT_DECAY)


def _choose_adamw(betas: tuple[float, float]) -> Inner:
    make = partial(_make_adamw, betas=betas)
    return Inner(f"AdamW(betas={betas})", make, _ADAMW_LR, LION_WEIGHT_DECAY)


def _make_sgd(entry: Entry, *, momentum: float) -> torch.optim.Optimizer:
    params = [param for _, param in entry.params]
    return torch.optim.SGD(params, entry.lr, momentum=momentum, weight_decay=entry.weight_decay)


LION, ADAMW = _choose_lion(LION_BETAS), _choose_adamw(ADAMW_BETAS)
_NOISY_ADAMW = replace(ADAMW, base_lr=_NOISY_ADAMW_LR)
_MOMENTUM_SGD = Inner(
    f"SGD(momentum={_SGD_MOMENTUM})",
    partial(_make_sgd, momentum=_SGD_MOMENTUM),
    _MOMENTUM_SGD_LR,
    _SGD_WEIGHT_DECAY,
)
_PLAIN_SGD = Inner("SGD()", partial(_make_sgd, momentum=0.0), _PLAIN_SGD_LR, _SGD_WEIGHT_DECAY)


def average(entry: Entry, *, inner: Inner, compression: _Method | None = None) -> VirtualAveraging:
    """Build the workers of an entry whose mean gradient an optimizer steps on."""
    if isinstance(compression, DeepGradientCompression):
        warmup_steps = round(_WARM_UP_SHARE * entry.steps)
        compression = replace(compression, warmup_steps=warmup_steps)
    baseline = VirtualBaseline(
        inner.make(entry), workers=entry.workers, compression=compression, seed=entry.seed
    )
    return VirtualAveraging(baseline, _count_rounds(entry.workers, compression))


def _count_rounds(workers: int, compression: _Method | None) -> int:
    """Count the rounds of a step, to the method's favor.

    Sums travel along a tree, 2 ceil(log2 N) rounds, PowerSGD's second factors after the first ones;
    payloads that are gathered go to everybody at once, and so do scalars that are exchanged before.
    """
    if workers == 1:
        return 0
    if isinstance(compression, PowerSGD):
        return 2 * _count_rounds(workers, None)
    if compression is None or not compression.gathers:
        return 2 * math.ceil(math.log2(workers))
    return 1 + compression.shares_scalar


def _baseline(
    name: str, description: str, inner: Inner, compression: _Method | None = None
) -> Contender:
    how = "mean gradient" if compression is None else repr(compression)
    if isinstance(compression, DeepGradientCompression):
        how += f" with a warm-up of {_WARM_UP_SHARE:.0%}"
    return Contender(
        name=name,
        description=description,
        definition=f"{how}; {inner.name}",
        kind=MethodKind.FULL_PRECISION if compression is None else MethodKind.BASELINE,
        base_lr=inner.base_lr,
        weight_decay=inner.weight_decay,
        enter=partial(average, inner=inner, compression=compression),
    )


_TERNGRAD = "TernGrad (arXiv:1705.07878)"
_GRADDROP = f"GradDrop (arXiv:1704.05021) of all but {_KEPT:.0%}"
_DGC = f"Deep Gradient Compression (arXiv:1712.01887) to {_KEPT:.0%}"
_LARGEST = GradDrop(keep=_KEPT)

_ALL = (
    _baseline("global-lion", "Lion on the mean gradient", LION),
    _baseline("global-adamw", "AdamW on the mean gradient", ADAMW),
    _baseline("global-sgd", "SGD with momentum on the mean gradient", _MOMENTUM_SGD),
    _baseline("ddp-fp16", "Lion on a float16 all-reduce", LION, HalfPrecision()),
    _baseline(
        "ddp-powersgd",
        f"PowerSGD (arXiv:1905.13727) of rank {PowerSGD().rank}, Lion",
        LION,
        PowerSGD(),
    ),
    _baseline("terngrad", f"{_TERNGRAD}, SGD with momentum", _MOMENTUM_SGD, TernGrad()),
    _baseline("terngrad-adamw", f"{_TERNGRAD}, AdamW", _NOISY_ADAMW, TernGrad()),
    _baseline("graddrop", f"{_GRADDROP}, SGD with momentum", _MOMENTUM_SGD, _LARGEST),
    _baseline("graddrop-adamw", f"{_GRADDROP}, AdamW", _NOISY_ADAMW, _LARGEST),
    _baseline(
        "dgc",
        f"{_DGC}, SGD with its momentum",
        _PLAIN_SGD,
        DeepGradientCompression(keep=_KEPT, momentum=_SGD_MOMENTUM),
    ),
)
BASELINES = {baseline.name: baseline for baseline in _ALL}
"""By name."""
_LION = "global-lion"
AVERAGER_NAMES = (
    *BASELINES,
    f"{_LION}-cautious",
    *(f"{base}-betas-A-B" for base in MEANS_WITH_BETAS),
    f"{_LION}-cautious-betas-A-B",
)
"""For messages and help; A and B are digits of betas."""


def find_averager(name: str) -> Contender | None:
    """Return the method of a name; None if there is none."""
    rest, betas = split_betas(name)
    base, cautious = split_cautious(rest)
    if betas is None and not cautious:
        return BASELINES.get(name)
    if base != _LION and (cautious or base not in MEANS_WITH_BETAS):
        return None
    description = describe_variant(BASELINES[base].description, cautious, betas)
    if base == _LION:
        return _baseline(name, description, _choose_lion(betas or LION_BETAS, cautious=cautious))
    assert betas is not None  # since it is not cautious
    return _baseline(name, description, _choose_adamw(betas))
