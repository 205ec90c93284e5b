"""One bucket's part in a step: draft and cast its vote, then commit what came back or let it go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from distlion.errors import GradientChangedError
from distlion.exchange import Exchanging, Header, Reply, Status, Verdict, with_error
from distlion.kernels import Coefficients, Coin, Coins, Segment
from distlion.voting.diagnostics import ParameterReply
from distlion.voting.gradients import GradientMark, digest_gradients, is_sparse
from distlion.voting.outcome import log_abstention
from distlion.voting.route import Route
from distlion.voting.segments import make_segment, write_back


@dataclass(frozen=True)
class StepInputs:
    """What the buckets of one step share.

    Attributes:
        rank: This rank among all workers.
        header: Its header, still without a bucket.
        coins: Its coins of this step.
        coefficients: Hyperparameters of every parameter.
        state: The optimizer's state, which holds ``exp_avg``.
        nonfinite: What follows values that are not finite.
        found_inf: Whether a GradScaler has seen an overflow on this worker.
        wants_digest: Whether raw gradients are to be compared between workers.
    """

    rank: int
    header: Header
    coins: Coins
    coefficients: Mapping[Tensor, Coefficients]
    state: Mapping[Tensor, Mapping[str, Any]]
    nonfinite: Literal["raise", "skip", "abstain"]
    found_inf: bool
    wants_digest: bool

    @property
    def grad_scale(self) -> float:
        """What raw gradients are multiplied by, equal for all parameters."""
        return next(iter(self.coefficients.values())).grad_scale


@dataclass(frozen=True)
class Draft:
    """One bucket before its vote is encoded.

    Attributes:
        route: What carries it.
        marks: The gradients of its parameters, as they are now.
        segments: What this rank votes for: the parameters, or with nodes its pieces of them;
            without gradient where it abstains.
        header: This worker's header, with what was found so far.
    """

    route: Route
    marks: Sequence[GradientMark]
    segments: Sequence[Segment]
    header: Header


@dataclass(frozen=True)
class BucketVote:
    """One bucket between its vote and its commit.

    Attributes:
        draft: What was voted.
        reply: What came back.
    """

    draft: Draft
    reply: Reply

    @property
    def verdict(self) -> Verdict:
        """What all workers found."""
        return self.reply.verdict

    def find_changed(self) -> int | None:
        """Find the first parameter whose gradient is not the one that was encoded.

        Returns:
            Its position among the trainable ones.
        """
        return _find_changed(self.draft)

    def list_replies(self) -> list[ParameterReply]:
        """List the replies on what this rank voted for, one for each parameter."""
        route, reply = self.draft.route, self.reply
        payload, present = reply.payload, reply.present
        if route.node is not None:
            payload, present = payload[route.node.link.rank], present[route.node.link.rank]
        packed = route.packed_reply(payload)
        ballot = route.ballot
        return [
            ParameterReply(position, slot, packed, route.rule.reply_format, n_present)
            for position, slot, n_present in zip(
                ballot.members, ballot.slots, present.tolist(), strict=False
            )
        ]

    def commit(self, inputs: StepInputs, rounding: Coin | None) -> None:
        """Write parameters and momenta."""
        route, params = self.draft.route, [mark.param for mark in self.draft.marks]
        if route.node is not None:
            route.node.commit(
                params, self.draft.segments, inputs.coefficients, self.reply, rounding
            )
            return
        route.commit(self.draft.segments, self.reply, rounding)
        for segment, param in zip(self.draft.segments, params, strict=True):
            write_back(param, segment.param)


def keep_header(header: Header) -> Header:
    """Return a header as it is: nothing is known of other buckets."""
    return header


def draft_vote(route: Route, params: Sequence[Tensor], inputs: StepInputs) -> Draft:
    """Take a bucket's gradients; with nodes, average them inside the node.

    Args:
        route: What carries the bucket.
        params: All trainable parameters.
        inputs: What the buckets share.
    """
    marks = [GradientMark.of(params[position]) for position in route.bucket.members]
    header = replace(inputs.header, bucket=route.bucket.index)
    sparse = [is_sparse(mark.param) for mark in marks]
    if any(sparse):
        position = route.bucket.members[sparse.index(True)]
        header = with_error(header, Status.SPARSE_GRADIENT, culprit=inputs.rank, detail=position)
    overflow = inputs.found_inf and inputs.nonfinite == "abstain"
    absent = [skipped or overflow for skipped in sparse]
    if route.node is None:
        segments = [
            make_segment(
                mark.param, inputs.state, slot, inputs.coefficients[mark.param], abstain=skipped
            )
            for mark, slot, skipped in zip(marks, route.bucket.slots, absent, strict=True)
        ]
        return Draft(route, marks, route.kernels.gather(segments), header)
    grads = [
        None if skipped or mark.grad is None else mark.grad.contiguous().view(-1)
        for mark, skipped in zip(marks, absent, strict=True)
    ]
    means, scale, header = route.node.average(grads, header, grad_scale=inputs.grad_scale)
    segments = route.node.make_segments(params, means, inputs.state, inputs.coefficients, scale)
    return Draft(route, marks, route.kernels.gather(segments), header)


def cast_vote(
    draft: Draft,
    inputs: StepInputs,
    *,
    after_encode: Callable[[], None],
    complete: Callable[[Header], Header] = keep_header,
) -> Exchanging[BucketVote]:
    """Encode this worker's vote on one bucket, and exchange it.

    An error found here travels in the header; every rank raises it once the schedule is complete.

    Args:
        draft: What to vote.
        inputs: What the buckets share.
        after_encode: Called once the vote is encoded.
        complete: Adds to the header what is known of other buckets.
    """
    route, segments, header = draft.route, draft.segments, draft.header
    if inputs.wants_digest and header.status is Status.OK:
        header = replace(header, detail=digest_gradients(route.kernels, segments))
    votes, flags = route.encode(segments, inputs.coins)
    finite: list[bool] = flags.tolist()  # where the host waits for the device
    if inputs.nonfinite == "abstain":
        if route.node is not None:
            finite, header = route.node.agree(finite, header)
        kept = abstain(segments, finite, rank=inputs.rank, step=header.step)
        if route.node is not None and kept is not segments:
            votes, _ = route.encode(kept, inputs.coins)
        segments = kept
    elif (position := find_nonfinite(finite, route.ballot.members, inputs)) is not None:
        header = with_error(header, Status.NON_FINITE, culprit=inputs.rank, detail=position)
    after_encode()
    changed = _find_changed(draft)
    if changed is not None:
        header = with_error(header, Status.GRADIENT_CHANGED, culprit=inputs.rank, detail=changed)
    header = complete(header)
    present = [segment.grad is not None for segment in segments]
    reply = yield from _exchange(route, header, votes, present, inputs.coins)
    return BucketVote(replace(draft, segments=segments), reply)


def abstain_from(
    route: Route, header: Header, coins: Coins, *, nonfinite: str
) -> Exchanging[BucketVote]:
    """Take part in a bucket's exchanges, as ``cast_vote``, without a vote on any parameter."""
    header = replace(header, bucket=route.bucket.index)
    if route.node is not None:
        _, _, header = route.node.average([None] * len(route.bucket.slots), header)
        if nonfinite == "abstain":
            _, header = route.node.agree([True] * len(route.ballot.slots), header)
    votes, _ = route.encode([], coins)
    reply = yield from _exchange(route, header, votes, [False] * len(route.ballot.slots), coins)
    return BucketVote(Draft(route, (), (), header), reply)


def _exchange(
    route: Route, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
) -> Exchanging[Reply]:
    if route.node is None:
        return (yield from route.exchange(header, votes, present, coins))
    if route.ballot.slots:
        reply = yield from route.exchange(header, votes, present, coins)
    else:  # so small a bucket that this rank has no piece of it, and waits for its node
        for _ in range(route.pattern.transfers):
            yield
        reply = route.node.reply_to_nobody(header)
    return route.node.share(reply, header)


def check_unchanged(
    votes: Sequence[BucketVote], names: Sequence[str], *, rank: int, step: int
) -> None:
    """Raise GradientChangedError where a gradient is not the one that was voted with."""
    for vote in votes:
        position = vote.find_changed()
        if position is not None:
            raise GradientChangedError(
                f"the gradient of {names[position]} changed here after it was sent; nothing was "
                "committed here, but other workers may have committed this step",
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


def find_nonfinite(
    finite: Sequence[bool], members: Sequence[int], inputs: StepInputs
) -> int | None:
    """Find the first parameter that is not finite; -1 where only a GradScaler knows which.

    Returns:
        Its position among the trainable ones.
    """
    if inputs.found_inf:
        return -1
    return None if all(finite) else members[finite.index(False)]


def _find_changed(draft: Draft) -> int | None:
    changed = (
        position
        for position, mark in zip(draft.route.bucket.members, draft.marks, strict=True)
        if mark.has_changed()
    )
    return next(changed, None)
