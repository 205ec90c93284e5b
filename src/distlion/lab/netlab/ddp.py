"""DistributedDataParallel as methods of a lab use it, with torch's own hooks."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlion.lab.baselines import (
    HALF_BYTES,
    AllReduceState,
    CountedPowerSGD,
    PowerSGD,
    half_precision_hook,
    power_sgd_hook,
)
from distlion.lab.netlab.method_names import DDP_FP16, DDP_POWERSGD

# What PowerSGD's hook needs.
_ONE_BUCKET_MB = 1 << 20


def wrap_in_ddp(model: nn.Module, name: str, *, seed: int) -> nn.Module:
    """Wrap a model as one of ``DDP_FP32``, ``DDP_FP16`` and ``DDP_POWERSGD``.

    Args:
        model: On every worker.
        name: Of the method.
        seed: Of PowerSGD's draws.
    """
    with warnings.catch_warnings():
        # Torch 2.13 renamed the argument; older ones know only this name.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_ONE_BUCKET_MB if name == DDP_POWERSGD else None,
        )
    group = wrapped.process_group
    if name == DDP_FP16:
        half = AllReduceState(group, element_bytes=HALF_BYTES)
        wrapped.register_comm_hook(half, half_precision_hook)
    elif name == DDP_POWERSGD:
        state = CountedPowerSGD(group, PowerSGD(), seed=seed)
        wrapped.register_comm_hook(state, power_sgd_hook)
    return wrapped
