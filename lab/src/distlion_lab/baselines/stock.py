"""PyTorch's own communication hooks, with an account of their bytes."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distlion.errors import InvalidArgumentError
from distlion_lab.baselines.half import HALF_BYTES
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.ring import FLOAT32_BYTES, ring_all_reduce_bytes

# DDP rebuilds its buckets before this step, and the hook keeps errors by bucket.
_LEAST_START_STEP = 2


@dataclass
class AllReduceState:
    """Count the numbers that gradient buckets handed to an all-reduce.

    Attributes:
        process_group: The workers.
        element_bytes: Size of a number on the wire.
        steps: Number of backward passes so far.
        n_elements: Count of numbers in all of them.
    """

    process_group: dist.ProcessGroup
    element_bytes: int = FLOAT32_BYTES
    steps: int = 0
    n_elements: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that each worker has sent, for all-reduces in a ring, as in Gloo."""
        return ring_all_reduce_bytes(
            self.n_elements, self.process_group.size(), element_bytes=self.element_bytes
        )

    def count(self, bucket: GradBucket, n_elements: int) -> None:
        """Count one bucket that sends ``n_elements`` numbers."""
        self.n_elements += n_elements
        self.steps += bucket.is_last()


class CountedPowerSGD(AllReduceState):
    """PowerSGD's state, with an account of its low-rank factors.

    Args:
        process_group: The workers.
        method: Rank, and number of steps before compression.
        seed: Seed of the first factors, equal on all workers.

    Raises:
        InvalidArgumentError: Compression would start before step 2, which PyTorch's hook refuses.
    """

    def __init__(self, process_group: dist.ProcessGroup, method: PowerSGD, *, seed: int) -> None:
        super().__init__(process_group)
        if method.start_step < _LEAST_START_STEP:
            raise InvalidArgumentError(
                f"{method!r}: PyTorch's hook starts at step {_LEAST_START_STEP} or later"
            )
        self.inner = PowerSGDState(
            process_group=process_group,
            matrix_approximation_rank=method.rank,
            start_powerSGD_iter=method.start_step,
            random_seed=seed,
        )


def full_precision_hook(state: AllReduceState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket as DDP does without a hook."""
    state.count(bucket, bucket.buffer().numel())
    return allreduce_hook(state.process_group, bucket)


def half_precision_hook(state: AllReduceState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket as float16 numbers; ``element_bytes`` of the state must be 2."""
    assert state.element_bytes == HALF_BYTES
    state.count(bucket, bucket.buffer().numel())
    return fp16_compress_hook(state.process_group, bucket)


def power_sgd_hook(state: CountedPowerSGD, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket by PowerSGD (arXiv:1905.13727).

    Notes:
        The model must have one bucket. PyTorch's hook starts further all-reduces when a bucket's
        first one is done. With several buckets their order differs between ranks, and Gloo then
        aborts the process.
    """
    full = state.inner.iter < state.inner.start_powerSGD_iter
    before = state.inner.total_numel_after_compression
    # The hook adds to its account before it returns.
    future: torch.futures.Future[Tensor] = powerSGD_hook(state.inner, bucket)
    compressed = state.inner.total_numel_after_compression - before
    state.count(bucket, bucket.buffer().numel() if full else compressed)
    return future
