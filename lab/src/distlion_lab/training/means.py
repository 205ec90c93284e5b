"""Methods that average gradients, compressed or not, and give the mean to an optimizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from distlion_lab.baselines.base import Compression
from distlion_lab.baselines.dgc import DeepGradientCompression
from distlion_lab.baselines.graddrop import GradDrop
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.one_bit_adam import WARM_UP_SHARE, OneBitAdam
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.terngrad import TernGrad
from distlion_lab.baselines.virtual import VirtualBaseline
from distlion_lab.training.inner import (
    ADAMW,
    ADAMW_BETAS,
    LION,
    MOMENTUM_SGD,
    MUON,
    NOISY_ADAMW,
    PLAIN_SGD,
    SGD_MOMENTUM,
    TRAIN_SGD,
    Inner,
    choose_adamw,
    choose_lion,
    choose_muon,
)
from distlion_lab.training.method import Method, MethodKind
from distlion_lab.training.name_parts import ORTHOGONAL, describe_variant, split_name
from distlion_lab.training.workers import (
    LION_BETAS,
    AveragingWorker,
    MethodRun,
    RealWorker,
    VirtualWorkers,
    VoteOptions,
)

# The comparison of arXiv:2404.00438 keeps 4 % of the entries.
_KEPT = 0.04
# Share of the run, in place of 4 epochs of the paper's 90 or more.
_WARM_UP_SHARE = 0.05
WITH_BETAS = LION_MEAN, ADAMW_MEAN, MUON_MEAN = "global-lion", "global-adamw", "global-muon"
"""Means whose names may have betas."""
_Compression = Compression | PowerSGD


def _mean(
    name: str,
    description: str,
    inner: Inner,
    compression: _Compression | None = None,
    *,
    train: Inner | None = None,
) -> Method:
    """Make a method of one optimizer; ``train`` is for real workers, None if they lack it."""
    how = "mean gradient" if compression is None else repr(compression)
    if isinstance(compression, DeepGradientCompression):
        how += f" with a warm-up of {_WARM_UP_SHARE:.0%}"
    return Method(
        name=name,
        description=description,
        definition=f"{how}; {inner.name}",
        kind=MethodKind.FULL_PRECISION if compression is None else MethodKind.BASELINE,
        base_lr=inner.base_lr,
        weight_decay=inner.weight_decay,
        enter=partial(enter_mean, inner=inner, compression=compression),
        start=partial(_start_mean, inner=train, compression=compression) if train else None,
        train_lr=(train or inner).base_lr,
        train_weight_decay=(train or inner).weight_decay,
    )


def enter_mean(
    run: MethodRun, *, inner: Inner, compression: _Compression | None = None
) -> VirtualWorkers:
    """Build virtual workers that average gradients for one optimizer."""
    compression = _warm_up(compression, run)
    optimizer = inner.make(run)
    return VirtualBaseline(optimizer, workers=run.workers, compression=compression, seed=run.seed)


def _start_mean(
    model: nn.Module,
    run: MethodRun,
    _: VoteOptions,
    *,
    inner: Inner,
    compression: _Compression | None,
) -> RealWorker:
    compression = _warm_up(compression, run)
    return AveragingWorker.build(model, inner.make(run), compression, seed=run.seed)


def _warm_up(compression: _Compression | None, run: MethodRun) -> _Compression | None:
    if not isinstance(compression, DeepGradientCompression):
        return compression
    share = round(_WARM_UP_SHARE * run.steps)
    return replace(
        compression, warmup_steps=share if run.warmup_steps is None else run.warmup_steps
    )


def _make_one_bit_adam() -> Method:
    return Method(
        name="one-bit-adam",
        description="1-bit Adam (arXiv:2102.02888), a fifth of the run in 32 bits",
        definition=f"{WARM_UP_SHARE:.0%} in float32, then signs with error feedback; {ADAMW.name}",
        kind=MethodKind.BASELINE,
        base_lr=ADAMW.base_lr,
        weight_decay=ADAMW.weight_decay,
        enter=_enter_one_bit_adam,
    )


def _enter_one_bit_adam(run: MethodRun) -> VirtualWorkers:
    return OneBitAdam(
        [param for _, param in run.params],
        lr=run.lr,
        decay=run.lr * run.weight_decay,
        workers=run.workers,
        steps=run.steps,
    )


_TERNGRAD = "TernGrad (arXiv:1705.07878)"
_GRADDROP = f"GradDrop (arXiv:1704.05021) of all but {_KEPT:.0%}"
_DGC = f"Deep Gradient Compression (arXiv:1712.01887) to {_KEPT:.0%}"
_POWERSGD_OF = "PowerSGD (arXiv:1905.13727) of"
_POWERSGD = f"{_POWERSGD_OF} rank {PowerSGD().rank}, Lion"
_LARGEST = GradDrop(keep=_KEPT)
_LARGEST_MOMENTUM = DeepGradientCompression(keep=_KEPT, momentum=SGD_MOMENTUM)

# TernGrad and GradDrop leave the optimizer open. Real workers get AdamW: with plain SGD, vision
# transformers and GPTs barely train. DGC has its own momentum, and SGD without momentum outside;
# the L2 term of that SGD is then decoupled weight decay.
_MEANS = (
    _mean(LION_MEAN, "Lion on the mean gradient", LION, train=LION),
    _mean(ADAMW_MEAN, "AdamW on the mean gradient", ADAMW, train=ADAMW),
    _mean(MUON_MEAN, "Muon on the mean gradient, AdamW where no hidden matrix", MUON, train=MUON),
    _mean("global-sgd", "SGD with momentum on the mean gradient", MOMENTUM_SGD),
    _mean("ddp-fp16", "Lion on a float16 all-reduce", LION, HalfPrecision(), train=LION),
    _mean("ddp-powersgd", _POWERSGD, LION, PowerSGD(), train=LION),
    _mean("terngrad", f"{_TERNGRAD}, SGD with momentum", MOMENTUM_SGD, TernGrad(), train=ADAMW),
    _mean("terngrad-adamw", f"{_TERNGRAD}, AdamW", NOISY_ADAMW, TernGrad()),
    _mean("graddrop", f"{_GRADDROP}, SGD with momentum", MOMENTUM_SGD, _LARGEST, train=ADAMW),
    _mean("graddrop-adamw", f"{_GRADDROP}, AdamW", NOISY_ADAMW, _LARGEST),
    _mean("dgc", f"{_DGC}, SGD with its momentum", PLAIN_SGD, _LARGEST_MOMENTUM, train=TRAIN_SGD),
    _mean("fp16-adamw", "AdamW on a float16 all-reduce", ADAMW, HalfPrecision()),
    _mean("powersgd-1-adamw", f"{_POWERSGD_OF} rank 1, AdamW", ADAMW, PowerSGD(rank=1)),
    _make_one_bit_adam(),
)
MEANS = {method.name: method for method in _MEANS}
"""Methods that average gradients, by name."""


_BUILD = {ADAMW_MEAN: choose_adamw, MUON_MEAN: choose_muon}


def find_mean(name: str) -> Method | None:
    """Return the method of this name that averages gradients; None where there is none."""
    base, cautious, betas = split_name(name)
    orthogonal = base == f"{LION_MEAN}{ORTHOGONAL}" and not cautious
    if betas is None and not cautious and not orthogonal:
        return MEANS.get(name)
    base = LION_MEAN if orthogonal else base
    if base == LION_MEAN:
        inner = choose_lion(betas or LION_BETAS, cautious=cautious, orthogonalize=orthogonal)
    elif base in _BUILD and not cautious:
        inner = _BUILD[base](betas or ADAMW_BETAS)
    else:
        return None
    description = describe_variant(MEANS[base].description, cautious, betas, orthogonal=orthogonal)
    return _mean(name, description, inner, train=inner)
