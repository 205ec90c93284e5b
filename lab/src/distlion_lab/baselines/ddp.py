"""DistributedDataParallel with the hook of a compression."""

from __future__ import annotations

import warnings
from typing import Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlion_lab.baselines.base import Compression
from distlion_lab.baselines.half import HALF_BYTES, HalfPrecision
from distlion_lab.baselines.hook import CompressionState, compression_hook
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.stock import (
    AllReduceState,
    CountedPowerSGD,
    full_precision_hook,
    half_precision_hook,
    power_sgd_hook,
)

# PowerSGD's hook needs one bucket.
_ONE_BUCKET_MB = 1 << 20


class Account(Protocol):
    """A communication hook's state, which counts steps and bytes."""

    @property
    def steps(self) -> int:
        """Return the number of backward passes so far."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent in all of them."""


def wrap_in_ddp(
    model: nn.Module, compression: Compression | PowerSGD | None
) -> DistributedDataParallel:
    """Wrap a model with the buckets that a compression needs, and without a hook."""
    with warnings.catch_warnings():
        # Torch 2.13 renamed the argument; older versions know only this name.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_ONE_BUCKET_MB if isinstance(compression, PowerSGD) else None,
        )


def compress_gradients(
    model: DistributedDataParallel, compression: Compression | PowerSGD | None, *, seed: int
) -> Account:
    """Register the hook of a compression; None counts the bytes of a float32 all-reduce.

    Args:
        model: Model from ``wrap_in_ddp`` for the same compression.
        compression: The method.
        seed: Seed of its draws, equal on all workers.

    Returns:
        The state of the hook.
    """
    group = model.process_group
    if compression is None:
        plain = AllReduceState(group)
        model.register_comm_hook(plain, full_precision_hook)
        return plain
    if isinstance(compression, HalfPrecision):
        half = AllReduceState(group, element_bytes=HALF_BYTES)
        model.register_comm_hook(half, half_precision_hook)
        return half
    if isinstance(compression, PowerSGD):
        low_rank = CountedPowerSGD(group, compression, seed=seed)
        model.register_comm_hook(low_rank, power_sgd_hook)
        return low_rank
    state = CompressionState(compression, model.parameters(), process_group=group, seed=seed)
    model.register_comm_hook(state, compression_hook)
    return state
