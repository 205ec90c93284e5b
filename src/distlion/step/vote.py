"""The votes of a step: each bucket is drafted, cast and committed, with several under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from distlion import faults
from distlion.errors import DeviceError, GradientChangedError
from distlion.failures import Status
from distlion.kernels.coin import Coins
from distlion.kernels.contract import Segment
from distlion.step.cut_matrices import CutMatrices
from distlion.step.gradients import digest_gradients, look_at_gradients
from distlion.step.inputs import StepInputs
from distlion.step.outcome import log_abstention
from distlion.step.param import (
    GradientMark,
    VotingParam,
    find_changed,
    find_sparse,
    make_segments,
    mark_gradients,
    take_gradients,
)
from distlion.step.route import Route
from distlion.wire.frame import Header
from distlion.wire.pattern import Exchanging, Reply
from distlion.wire.verdict import Verdict, with_error, with_error_of, worst_of

T = TypeVar("T")


class Clipper(Protocol):
    """Scale the gradients of a step down to a norm."""

    def measure(self, segments: Sequence[Segment], header: Header) -> tuple[Header, float]:
        """Measure the norm of all gradients; return the header, with peers' errors, and it."""
        ...

    def scale(self, segments: Sequence[Segment], norm: float) -> Sequence[Segment]:
        """Scale segments of gradients whose joint norm is ``norm``."""
        ...


class Completion(NamedTuple):
    """The findings about a whole step that its last bucket's header carries.

    Attributes:
        flags: Flags to read together with the votes of that bucket, with one wait for its device.
        complete: Function that adds the findings to the header; takes the flags on the host.
    """

    flags: Tensor
    complete: Callable[[Header, Tensor], Header]


@dataclass(frozen=True)
class Draft:
    """One bucket before its vote is encoded.

    Attributes:
        route: The route of the bucket.
        marks: Marks of the present gradients of its parameters.
        segments: This rank's segments of ``route.own``, without a gradient where it abstains; empty
            if it cannot vote.
        header: This worker's header, with errors found so far.
        can_vote: Whether there is a segment for each of them.
        norm: The norm by which all gradients of the step are clipped; None without clipping.
        directions: Segments to encode in place of ``segments``, where some are pieces of matrices
            that were orthogonalized whole; None for none.
    """

    route: Route
    marks: Sequence[GradientMark]
    segments: Sequence[Segment]
    header: Header
    can_vote: bool = True
    norm: float | None = None
    directions: Sequence[Segment] | None = None

    def clipped(self, norm: float, clipper: Clipper, found: Header) -> Draft:
        """Return the draft with clipped gradients, and with an error found on the way, if worse."""
        scaled = clipper.scale(self.segments, norm)
        segments, header = self.route.kernels.gather(scaled), with_error_of(self.header, found)
        return replace(self, segments=segments, header=header, norm=norm)

    def list_counted(self) -> list[Segment]:
        """List the segments that a norm counts here: the first rank counts shards with copies."""
        if not self.can_vote:
            return []
        own = zip(self.route.own, self.segments, strict=True)
        return [segment for param, segment in own if param.copies.is_first]

    def find_changed(self) -> VotingParam | None:
        """Find the first parameter whose gradient differs from the encoded one."""
        return find_changed(self.marks)


@dataclass(frozen=True)
class CastVote:
    """One bucket between its vote and its commit.

    Attributes:
        draft: The draft of the vote.
        reply: The reply.
    """

    draft: Draft
    reply: Reply

    def commit(self, inputs: StepInputs) -> None:
        """Write parameters and momenta, and note the norm of the step."""
        self.draft.route.commit(
            self.draft.segments, self.reply, inputs.coefficients, inputs.rounding
        )
        if self.draft.norm is not None:
            inputs.note_norm(self.draft.norm)


class Pipeline(Generic[T]):
    """Exchanges that take turns, in a sequence that depends only on their order.

    Each new one sends before the earlier ones wait, and each of these goes one round further:

        votes of bucket 1 | votes of 2, replies of 1 | votes of 3, replies of 2 | replies of 3

    So all ranks start the same collectives in the same order, as long as all add the same buckets.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, Exchanging[T]] = {}  # the oldest first
        self._results: dict[int, T] = {}

    def add(self, exchanging: Exchanging[T]) -> None:
        """Start an exchange, then take each earlier one a round further.

        Raises:
            DistlionError: Any error of one of them; the pipeline is then unusable.
        """
        earlier, number = list(self._under_way), len(self._under_way) + len(self._results)
        self._under_way[number] = exchanging
        self._advance([number, *earlier])

    def drain(self) -> list[T]:
        """Complete all exchanges, and return their results in the order of ``add``."""
        while self._under_way:
            self._advance(list(self._under_way))
        return list(map(self._results.__getitem__, range(len(self._results))))

    def _advance(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            try:
                next(self._under_way[number])
            except StopIteration as end:
                self._results[number] = end.value
                del self._under_way[number]


def run_all(exchanges: Iterable[Exchanging[T]]) -> list[T]:
    """Run exchanges through one pipeline; each is made when its turn to start comes."""
    pipeline = Pipeline[T]()
    for exchanging in exchanges:
        pipeline.add(exchanging)
    return pipeline.drain()


def draft_vote(route: Route, inputs: StepInputs) -> Draft:
    """Take a bucket's gradients; with nodes, average them inside the node."""
    header = replace(inputs.header, bucket=route.bucket.index)
    if header.status is not Status.OK:
        return draft_nothing(route, header)
    marks: list[GradientMark] = []
    try:
        marks += mark_gradients(route.params)
        grads = take_gradients(route.params)
    except Exception as error:  # noqa: BLE001
        return replace(draft_nothing(route, inputs.refuse(header, error)), marks=marks)
    sparse = find_sparse(marks)
    if sparse is not None:
        header = with_error(
            header, Status.SPARSE_GRADIENT, culprit=inputs.rank, position=sparse.position
        )
    if inputs.found_inf and inputs.nonfinite == "abstain":
        grads = [None] * len(grads)
    elif inputs.found_inf:
        header = with_error(header, Status.OVERFLOW, culprit=inputs.rank)
    means, scale, header = route.average(grads, header, inputs.coefficients[0].grad_scale)
    try:
        segments = make_segments(route.own, means, inputs.coefficients, scale)
        gathered = route.kernels.gather(segments)
    except Exception as error:  # noqa: BLE001
        return Draft(route, marks, (), inputs.refuse(header, error), can_vote=False)
    return Draft(route, marks, gathered, header)


def cast_vote(
    draft: Draft, inputs: StepInputs, completion: Completion | None = None
) -> Exchanging[CastVote]:
    """Encode this worker's vote on one bucket, and exchange it.

    An error found here travels in the header; every rank raises it once the schedule is complete.

    Args:
        draft: The draft of the vote.
        inputs: The inputs that the buckets share.
        completion: Completion of the last bucket under overlap; None for others.
    """
    if draft.route.matrices is not None:
        draft = _orthogonalize(draft, draft.route.matrices, inputs)
    if draft.can_vote:
        try:
            votes, finite, header, flags = _encode(draft, inputs, completion)
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001
            refused = inputs.refuse(draft.header, error)
            draft = replace(draft, segments=(), header=refused, can_vote=False)
    if not draft.can_vote:
        if completion is not None:
            header = completion.complete(draft.header, completion.flags.cpu())
            draft = replace(draft, header=header)
        return (yield from _cast_nothing(draft, inputs.coins, nonfinite=inputs.nonfinite))
    route, segments = draft.route, draft.segments
    if inputs.nonfinite == "abstain":
        segments, votes, header = _agree_to_abstain(draft, votes, finite, header, inputs)
    elif not all(finite):
        position = route.own[finite.index(False)].position
        header = with_error(header, Status.NON_FINITE, culprit=inputs.rank, position=position)
    present = [segment.grad is not None and not inputs.is_excluded for segment in segments]
    if faults.armed:
        inputs.after_encode()
    changed = draft.find_changed()
    if changed is not None:
        header = with_error(
            header, Status.GRADIENT_CHANGED, culprit=inputs.rank, position=changed.position
        )
    if completion is not None:
        header = completion.complete(header, *flags)
    reply = yield from route.exchange(header, votes, present, inputs.coins)
    directions = draft.directions if inputs.keeps_directions else None
    return CastVote(replace(draft, segments=segments, directions=directions), reply)


def _orthogonalize(draft: Draft, matrices: CutMatrices, inputs: StepInputs | None) -> Draft:
    """Orthogonalize the matrices of a bucket that are cut over the ranks of this worker.

    Args:
        draft: The draft, with clipped gradients.
        matrices: The matrices.
        inputs: The inputs of the step; not needed where this rank cannot vote.
    """
    own = draft.route.own if draft.can_vote else ()
    by_position = {param.position: draft.segments[index] for index, param in enumerate(own)}
    can_vote = draft.can_vote and inputs is not None
    given, header = matrices.orthogonalize(by_position, draft.header, inputs if can_vote else None)
    if header.status is not Status.OK or not can_vote:
        return replace(draft, segments=(), header=header, can_vote=False)
    dropped = {position for position, segment in given.items() if segment is None}
    segments = without_gradients(draft.segments, [each.position not in dropped for each in own])
    directions = [
        given.get(param.position) or segment for param, segment in zip(own, segments, strict=True)
    ]
    return replace(draft, segments=segments, directions=directions)


def _agree_to_abstain(
    draft: Draft, votes: Tensor, finite: Sequence[bool], header: Header, inputs: StepInputs
) -> tuple[Sequence[Segment], Tensor, Header]:
    """Take the votes that are not finite on some rank of this worker out of an encoded vote."""
    agreed, header = draft.route.agree(finite, header, overflow=inputs.found_inf)
    kept = abstain(draft.segments, agreed, rank=inputs.rank, step=header.step)
    if agreed != finite:
        # Another rank refused a parameter of which a piece, or shard, was encoded here.
        encoded = kept if draft.directions is None else draft.directions
        votes, *_ = draft.route.encode(without_gradients(encoded, agreed), inputs.coins)
    return kept, votes, header


def _encode(
    draft: Draft, inputs: StepInputs, completion: Completion | None
) -> tuple[Tensor, Sequence[bool], Header, list[Tensor]]:
    """Encode a vote, and read it together with flags on its device.

    Returns:
        The vote, without bits if this worker's votes do not count; whether each segment is finite;
        the header with their digest, and the flags of a completion.
    """
    route, segments, header = draft.route, draft.segments, draft.header
    wants_digest = inputs.wants_digest and header.status is Status.OK
    seen = [look_at_gradients(route.kernels, segments)] if wants_digest else []
    asked = [] if completion is None else [completion.flags]
    encoded = segments if draft.directions is None else draft.directions
    votes, finite, *read = route.encode(encoded, inputs.coins, *asked, *seen)
    if inputs.is_excluded:
        votes, *_ = route.encode([], inputs.coins)
    if seen:
        header = replace(header, gradient_digest=digest_gradients(segments, read[-1]))
    return votes, finite.tolist(), header, read[: len(asked)]


def draft_and_cast(
    route: Route, inputs: StepInputs, completion: Completion | None = None
) -> Exchanging[CastVote]:
    """Draft a bucket's vote and cast it; ``completion`` as for ``cast_vote``."""
    return cast_vote(draft_vote(route, inputs), inputs, completion)


def cast_votes(
    routes: Sequence[Route], inputs: StepInputs, clipper: Clipper | None
) -> list[CastVote]:
    """Draft, clip and cast the votes on all buckets."""
    pipeline = Pipeline[CastVote]()
    if clipper is None:
        for route in routes:  # one bucket's votes travel while the next one is encoded
            pipeline.add(draft_and_cast(route, inputs))
        return pipeline.drain()
    # A norm covers all gradients, so all must be there before the first vote is encoded.
    drafts = [draft_vote(route, inputs) for route in routes]
    header, norm = clipper.measure(
        [segment for draft in drafts for segment in draft.list_counted()], inputs.header
    )
    for draft in drafts:
        pipeline.add(cast_vote(draft.clipped(norm, clipper, header), inputs))
    return pipeline.drain()


def abstain_from(
    route: Route, header: Header, coins: Coins, *, nonfinite: str
) -> Exchanging[CastVote]:
    """Take part in a bucket's exchanges, as ``cast_vote``, without voting on any parameter."""
    draft = draft_nothing(route, header)
    return (yield from cast_nothing(draft, coins, nonfinite=nonfinite))


def draft_nothing(route: Route, header: Header) -> Draft:
    """Take part in the exchanges of ``draft_vote``, without a gradient."""
    header = replace(header, bucket=route.bucket.index)
    _, _, header = route.average([None] * len(route.params), header, 1.0)
    return Draft(route, (), (), header, can_vote=False)


def cast_nothing(draft: Draft, coins: Coins, *, nonfinite: str) -> Exchanging[CastVote]:
    """Take part in the exchanges of ``cast_vote``, without voting on any parameter."""
    if draft.route.matrices is not None:
        draft = _orthogonalize(draft, draft.route.matrices, None)
    return (yield from _cast_nothing(draft, coins, nonfinite=nonfinite))


def _cast_nothing(draft: Draft, coins: Coins, *, nonfinite: str) -> Exchanging[CastVote]:
    """Take part in the rest of ``cast_vote``, without voting on any parameter."""
    route, header = draft.route, draft.header
    if nonfinite == "abstain":
        _, header = route.agree([True] * len(route.own), header, overflow=False)
    votes, *_ = route.encode([], coins)
    reply = yield from route.exchange(header, votes, [False] * len(route.own), coins)
    return CastVote(replace(draft, header=header), reply)


def judge_votes(votes: Sequence[CastVote]) -> Verdict:
    """Join the verdicts on all buckets; OK if there is no error, or no bucket."""
    verdicts = [vote.reply.verdict for vote in votes]
    wrong = [verdict for verdict in verdicts if verdict.status is not Status.OK]
    return worst_of(wrong) if wrong else Verdict(Status.OK)


def check_unchanged(votes: Sequence[CastVote], *, rank: int, step: int) -> None:
    """Raise GradientChangedError if a gradient differs from the one that was voted with."""
    for vote in votes:
        changed = vote.draft.find_changed()
        if changed is not None:
            raise GradientChangedError(
                f"the gradient of {changed.name} changed here after it was sent; nothing was "
                "committed here, but other workers may have committed this step",
                rank=rank,
                step=step,
                culprits=(rank,),
            )


def abstain(
    segments: Sequence[Segment], finite: Sequence[bool], *, rank: int, step: int
) -> Sequence[Segment]:
    """Remove the gradient from segments that are not finite, and log it."""
    if all(finite):
        return segments
    names = [segment.slot.name for index, segment in enumerate(segments) if not finite[index]]
    log_abstention(names, rank=rank, step=step)
    return without_gradients(segments, finite)


def without_gradients(segments: Sequence[Segment], has_vote: Sequence[bool]) -> Sequence[Segment]:
    """Remove the gradient from segments without a vote."""
    if all(has_vote):
        return segments
    return [
        segment if votes else segment._replace(grad=None)
        for segment, votes in zip(segments, has_vote, strict=True)
    ]
