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
from distlion.lab.baselines.half import HALF_BYTES
from distlion.lab.baselines.power_sgd import PowerSGD
from distlion.lab.baselines.ring import FLOAT32_BYTES, ring_all_reduce_bytes

# DDP cuts its buckets anew before it, and errors are kept by bucket.
_LEAST_START_STEP = 2


@dataclass
class AllReduceState:
    """Count the numbers that gradient buckets handed to an all-reduce.

    Attributes:
        process_group: The workers.
        element_bytes: Of a number on the wire.
        steps: Backward passes so far.
        n_elements: Numbers in all of them.
    """

    process_group: dist.ProcessGroup
    element_bytes: int = FLOAT32_BYTES
    steps: int = 0
    n_elements: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that each worker has sent, if the all-reduce is a ring, as Gloo's is."""
        return ring_all_reduce_bytes(
            self.n_elements, self.process_group.size(), element_bytes=self.element_bytes
        )

    def count(self, bucket: GradBucket, n_elements: int) -> None:
        """Count one bucket, of which ``n_elements`` numbers travel."""
        self.n_elements += n_elements
        self.steps += bucket.is_last()


class CountedPowerSGD(AllReduceState):
    """PowerSGD's state, with an account of what its low-rank factors take.

    Args:
        process_group: The workers.
        method: Rank, and steps before it.
        seed: Of the first factors, equal on all workers.

    Raises:
        InvalidArgumentError: It would start before step 2, which PyTorch's hook cannot.
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
        The model must have one bucket. PyTorch's hook starts further all-reduces when the first of
        a bucket is done: with several buckets in an order that differs between ranks, on which
        Gloo aborts the process.
    """
    full = state.inner.iter < state.inner.start_powerSGD_iter
    before = state.inner.total_numel_after_compression
    # It adds to its account before it returns.
    future: torch.futures.Future[Tensor] = powerSGD_hook(state.inner, bucket)
    compressed = state.inner.total_numel_after_compression - before
    state.count(bucket, bucket.buffer().numel() if full else compressed)
    return future
