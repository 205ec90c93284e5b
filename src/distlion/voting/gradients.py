"""What is remembered of raw gradients: whether they changed, and whether all workers had them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from distlion.errors import IdenticalGradientsWarning
from distlion.kernels import Kernels, Segment
from distlion.kernels.coin import mix

WATCHED_STEPS = 3
# observe, _vote_and_commit, _do_step, step, and the wrappers of no_grad and of torch.optim.
USER_STACKLEVEL = 7


def describe_sparse(name: str) -> str:
    """Say what to do about a sparse gradient."""
    return (
        f"{name} has a sparse gradient; every element is voted on, so build the embedding with "
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
    own, are_told = told.tolist()
    digest = 0
    for index, (segment, _) in enumerate(pairs):
        if are_told[index]:
            digest = mix(digest + own[index] + segment.slot.first_word)
    return digest - (1 << 64) if digest >> 63 else digest


class IdenticalGradientsWatch:
    """Warn once where all workers had equal raw gradients in each of the first three steps.

    Digests travel in the headers of votes, so that this needs no collective of its own.

    Attributes:
        steps_left: Steps whose digests are still wanted.
    """

    def __init__(self) -> None:
        self.steps_left = WATCHED_STEPS

    def observe(self, digests: Sequence[Sequence[int]]) -> None:
        """Take the digests of one step: for each bucket, one from every rank."""
        if not any(digests):  # a server's reply carries none: the server observes
            self.steps_left -= 1
            return
        telling = [set(bucket) for bucket in digests if any(bucket)]
        if not telling or any(len(values) > 1 for values in telling):
            self.steps_left = 0
            return
        self.steps_left -= 1
        if self.steps_left == 0:
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
