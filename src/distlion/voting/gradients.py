"""What is remembered of raw gradients: whether they changed, and whether all workers had them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import IdenticalGradientsWarning
from distlion.kernels import Kernels, Segment
from distlion.kernels.coin import mix

WATCHED_STEPS = 3
# observe, _vote_and_commit, _do_step, step, and the wrappers of no_grad and of torch.optim.
USER_STACKLEVEL = 7


@dataclass(frozen=True)
class GradientMark:
    """A gradient as it was when it was encoded: the tensor, its version and its address."""

    param: Tensor
    grad: Tensor | None
    version: int
    address: int

    @classmethod
    def of(cls, param: Tensor) -> GradientMark:
        """Mark the present gradient of ``param``."""
        grad = param.grad
        if grad is None or is_sparse(param):  # a sparse tensor has no address
            return cls(param, grad, version=-1, address=0)
        return cls(param, grad, grad._version, grad.data_ptr())

    def has_changed(self) -> bool:
        """Whether ``param`` has another gradient now, or the same one was written to."""
        now = GradientMark.of(self.param)
        same = (now.version, now.address) == (self.version, self.address)
        return now.grad is not self.grad or not same


def is_sparse(param: Tensor) -> bool:
    """Tell whether a parameter has a sparse gradient."""
    return param.grad is not None and param.grad.layout is not torch.strided


def describe_sparse(name: str) -> str:
    """Say what to do about a sparse gradient."""
    return (
        f"{name} has a sparse gradient; every coordinate is voted on, so build the embedding with "
        "sparse=False"
    )


def digest_gradients(kernels: Kernels, segments: Sequence[Segment]) -> int:
    """Digest a bucket's raw gradients, signed 64 bits; 0 where all are absent or 0."""
    pairs = [(segment, segment.grad) for segment in segments if segment.grad is not None]
    if not pairs:
        return 0
    grads = [grad for _, grad in pairs]
    # Together, so that the host waits for the device once.
    told = torch.stack([kernels.digests(grads), torch.stack([grad.any() for grad in grads])])
    digest = 0
    for (segment, _), own, is_told in zip(pairs, *told.tolist(), strict=True):
        if is_told:
            digest = mix(digest + own + segment.slot.first_word)
    return digest - (1 << 64) if digest >> 63 else digest


class IdenticalGradientsWatch:
    """Warn once where all workers had equal raw gradients in each of the first three steps."""

    def __init__(self) -> None:
        self._steps_left = WATCHED_STEPS

    @property
    def is_watching(self) -> bool:
        """Whether digests are still wanted."""
        return self._steps_left > 0

    def observe(self, digests: Sequence[Sequence[int]]) -> None:
        """Take the digests of one step: for each bucket, one from every rank."""
        if not self.is_watching:
            return
        if not any(digests):  # a server's reply carries none: the server observes
            self._steps_left -= 1
            return
        telling = [set(bucket) for bucket in digests if any(bucket)]
        if not telling or any(len(values) > 1 for values in telling):
            self._steps_left = 0
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            warnings.warn(
                f"all workers had the same gradients in the first {WATCHED_STEPS} steps, so their "
                "votes say no more than one worker's. Either the model is wrapped in "
                "DistributedDataParallel, which averages gradients before the vote: turn that off "
                "by distlion.integrations.ddp.disable_all_reduce(model). Or all ranks read the "
                "same data: give each rank its own part, for example by "
                "torch.utils.data.DistributedSampler.",
                IdenticalGradientsWarning,
                stacklevel=USER_STACKLEVEL,
            )
