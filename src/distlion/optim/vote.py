"""One bucket's part in a step: encode and exchange it, then commit it or let it go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from distlion.errors import GradientChangedError
from distlion.exchange import Header, Reply, Status
from distlion.kernels import Coefficients, Coin, Coins, Segment
from distlion.optim.gradients import GradientMark, digest_gradients, is_sparse
from distlion.optim.route import Route
from distlion.optim.segments import make_segment, write_back
from distlion.optim.verdict import log_abstention


@dataclass(frozen=True)
class StepInputs:
    """What the buckets of one step share.

    Attributes:
        header: This worker's header, still without a bucket.
        coins: Its coins of this step.
        coefficients: Hyperparameters of every parameter.
        state: The optimizer's state, which holds ``exp_avg``.
        nonfinite: What follows values that are not finite.
        found_inf: Whether a GradScaler has seen an overflow on this worker.
        wants_digest: Whether raw gradients are to be compared between workers.
    """

    header: Header
    coins: Coins
    coefficients: Mapping[Tensor, Coefficients]
    state: Mapping[Tensor, Mapping[str, Any]]
    nonfinite: Literal["raise", "skip", "abstain"]
    found_inf: bool
    wants_digest: bool


@dataclass(frozen=True)
class BucketVote:
    """One bucket between its vote and its commit.

    Attributes:
        route: What carries the bucket.
        segments: Its parameters; without gradient where this worker abstains.
        marks: Their gradients as they were encoded.
        reply: What came back.
    """

    route: Route
    segments: Sequence[Segment]
    marks: Sequence[GradientMark]
    reply: Reply

    def find_changed(self) -> str | None:
        """Name the first parameter whose gradient is not the one that was encoded."""
        position = _first(mark.has_changed() for mark in self.marks)
        return None if position is None else self.segments[position].slot.name

    def commit(self, rounding: Coin | None) -> None:
        """Write parameters and momenta."""
        self.route.commit(self.segments, self.reply, rounding)
        for segment, mark in zip(self.segments, self.marks, strict=True):
            write_back(mark.param, segment.param)


def cast_vote(
    route: Route, params: Sequence[Tensor], inputs: StepInputs, *, after_encode: Callable[[], None]
) -> BucketVote:
    """Encode this worker's vote on one bucket, and exchange it.

    An error found here travels in the header; every rank raises it once the schedule is complete.
    """
    marks = [GradientMark.of(param) for param in params]
    sparse = [is_sparse(param) for param in params]
    overflow = inputs.found_inf and inputs.nonfinite == "abstain"
    segments = route.kernels.gather(
        [
            make_segment(
                param, inputs.state, slot, inputs.coefficients[param], abstain=skipped or overflow
            )
            for param, slot, skipped in zip(params, route.bucket.slots, sparse, strict=True)
        ]
    )
    digest = digest_gradients(route.kernels, segments) if inputs.wants_digest else 0
    header = replace(inputs.header, bucket=route.bucket.index, detail=digest)
    votes, finite = route.encode(segments, inputs.coins)
    if inputs.nonfinite == "abstain":
        segments = abstain(segments, finite, rank=header.sender, step=header.step)
    else:
        position = find_nonfinite(finite, inputs)
        if position is not None:
            header = _with_error(header, Status.NON_FINITE, position)
    if any(sparse):
        header = _with_error(header, Status.SPARSE_GRADIENT, sparse.index(True))
    after_encode()
    changed = _first(mark.has_changed() for mark in marks)
    if changed is not None:
        header = _with_error(header, Status.GRADIENT_CHANGED, changed)
    present = [segment.grad is not None for segment in segments]
    reply = route.exchange(header, votes, present, inputs.coins)
    return BucketVote(route, segments, marks, reply)


def check_unchanged(votes: Sequence[BucketVote], *, rank: int, step: int) -> None:
    """Raise GradientChangedError where a gradient is not the one that was voted with."""
    for vote in votes:
        name = vote.find_changed()
        if name is not None:
            raise GradientChangedError(
                f"the gradient of {name} changed here after it was sent; nothing was committed "
                "here, but other workers may have committed this step",
                rank=rank,
                step=step,
                culprits=(rank,),
            )


def abstain(
    segments: Sequence[Segment], finite: Sequence[bool], *, rank: int, step: int
) -> Sequence[Segment]:
    """Take the gradient from segments that are not finite, and say so in the log."""
    if all(finite):
        return segments
    pairs = list(zip(segments, finite, strict=True))
    names = [segment.slot.name for segment, is_finite in pairs if not is_finite]
    log_abstention(names, rank=rank, step=step)
    return [segment if is_finite else segment._replace(grad=None) for segment, is_finite in pairs]


def find_nonfinite(finite: Sequence[bool], inputs: StepInputs) -> int | None:
    """Find the first parameter that is not finite; -1 where only a GradScaler knows which."""
    if inputs.found_inf:
        return -1
    return None if all(finite) else finite.index(False)


def _with_error(header: Header, status: Status, position: int) -> Header:
    return replace(header, status=status, culprit=header.sender, detail=position)


def _first(flags: Any) -> int | None:
    """Find the position of the first true flag."""
    return next((position for position, flag in enumerate(flags) if flag), None)
