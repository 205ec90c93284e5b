"""A bucket of parameters through a step: 1 load gradients, 2 encode and exchange, 3 commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from distlion import faults
from distlion.errors import DeviceError, GradientChangedError, InvalidArgumentError
from distlion.failures import Status
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients, Segment
from distlion.kernels.reference import Kernels
from distlion.layout import BucketLayout
from distlion.step.cut_matrices import CutMatrices
from distlion.step.gradients import digest_gradients, look_at_gradients
from distlion.step.inputs import StepInputs
from distlion.step.outcome import log_abstention
from distlion.step.param import (
    GradientMark,
    Records,
    VotingParam,
    find_changed,
    find_sparse,
    make_segments,
    mark_gradients,
    take_gradients,
)
from distlion.step.staging import bring_down, bring_up, name_failure
from distlion.votes.aggregation import Aggregation
from distlion.votes.bucket_vote import BucketCount, BucketVote
from distlion.votes.reply import ParameterReply
from distlion.wire.frame import Header
from distlion.wire.node_frames import gather_flags
from distlion.wire.pattern import Ballot, Exchange, Exchanging, Reply
from distlion.wire.transport import ByteCount, Transfer, Transport
from distlion.wire.verdict import Verdict, with_error, worst_of

if TYPE_CHECKING:
    from distlion.step.stage import Stage

T = TypeVar("T")


class Completion(NamedTuple):
    """Checks of the whole step, reported in the last bucket's header under overlap.

    Attributes:
        flags: Flags to read together with the votes of that bucket, with one wait for its device.
        complete: Function that adds the errors to the header; takes the flags on the host.
    """

    flags: Tensor
    complete: Callable[[Header, Tensor], Header]


_NOTHING = torch.zeros(0, dtype=torch.uint8, device="cpu")
NO_REPLY = Reply(Verdict(Status.OK), _NOTHING, _NOTHING)
"""The reply of a bucket before its exchange has ended."""


class Bucket:
    """Parameters that travel together, each voted on as a whole by this rank.

    A step calls ``load``, ``cast`` and ``commit`` in this order, and ``clear`` at its end. An error
    found on the way travels in the header, so that every rank raises it after all exchanges.

    Args:
        layout: The layout of the parameters.
        params: The parameters, in order.
        vote: The vote on the bucket, with the state of its rule between steps.
        pattern: The exchange pattern.
        device: Their device.
        kernels: The arithmetic there.
        link: The link between voters.
        inside: The link to ranks with other shards of the same parameters; None for none.
        matrices: The matrices among the parameters that are cut over those ranks; None for none.

    Attributes:
        rule: The rule of the vote.
        own: The parameters that this rank votes for; with nodes, its pieces of them.
        marks: Marks of the gradients of this step; empty before ``load``, like the next one.
        segments: This rank's segments of ``own``, without a gradient where it abstains; empty if it
            cannot vote.
        header: This worker's header, with the errors found so far.
        directions: Segments that were encoded in place of ``segments``, where some are pieces of
            matrices that were orthogonalized whole; None for none.
        reply: The reply of this step.
    """

    averages: ClassVar[bool] = False
    """True if the ranks of a node average their gradients before they vote."""
    header: Header

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[VotingParam],
        vote: BucketVote,
        pattern: Exchange,
        device: torch.device,
        kernels: Kernels,
        link: Transport,
        *,
        inside: Transport | None = None,
        matrices: CutMatrices | None = None,
    ) -> None:
        roster = vote.roster
        if roster.owners != roster.ids:
            raise InvalidArgumentError(
                "a pattern lets every voter count one shard; expected a roster whose owners are "
                f"its ids, not {roster}"
            )
        self.layout, self.params, self.vote, self.pattern = layout, Records(params), vote, pattern
        self.device, self.kernels, self.link = device, kernels, link
        self.inside, self.matrices = inside, matrices
        self.own = self.params
        self.rule: Aggregation = vote.rule
        # The network reads host memory.
        self._is_on_host = device == link.wire_device
        self.clear()

    def clear(self) -> None:
        """Release the tensors of a step."""
        self.marks: list[GradientMark] = []
        self.segments: Sequence[Segment] = ()
        self.directions: Sequence[Segment] | None = None
        self.reply = NO_REPLY
        self.can_vote = False

    @property
    def parts(self) -> Sequence[Bucket]:
        """The buckets of the node's ranks, each of its own pieces; without nodes, this one."""
        return (self,)

    def plan(self) -> ByteCount:
        """Declare the bytes that this rank sends between voters."""
        return self.pattern.plan(self.vote.shape, self.link.rank)

    # 1 load gradients

    def load(self, inputs: StepInputs) -> None:
        """Take the gradients of a step; with nodes, average them inside the node."""
        self.clear()
        header = inputs.header.amended(bucket=self.layout.index)
        if header.status is not Status.OK:
            self.load_nothing(header)
            return
        try:
            self.marks = mark_gradients(self.params)
            grads = take_gradients(self.params)
        except Exception as error:  # noqa: BLE001
            self.load_nothing(inputs.refuse(header, error))
            return
        sparse = find_sparse(self.marks)
        if sparse is not None:
            header = with_error(
                header, Status.SPARSE_GRADIENT, culprit=inputs.rank, position=sparse.position
            )
        if inputs.found_inf and inputs.nonfinite == "abstain":
            grads = [None] * len(grads)
        elif inputs.found_inf:
            header = with_error(header, Status.OVERFLOW, culprit=inputs.rank)
        self.header, scale = header, inputs.coefficients[0].grad_scale
        if self.averages:
            grads, scale, self.header = self.average(grads, header, scale)
        try:
            segments = make_segments(self.own, grads, inputs.coefficients, scale)
            self.segments = self.kernels.gather(segments)
            self.can_vote = True
        except Exception as error:  # noqa: BLE001
            self.header = inputs.refuse(self.header, error)

    def load_nothing(self, header: Header) -> None:
        """Take part in the exchanges of ``load``, without a gradient."""
        self.header = header = header.amended(bucket=self.layout.index)
        if self.averages:
            _, _, self.header = self.average([None] * len(self.params), header, 1.0)

    def average(
        self, grads: Sequence[Tensor | None], header: Header, grad_scale: float
    ) -> tuple[list[Tensor | None], float, Header]:
        """Average gradients inside the node, where ``averages`` says so.

        Args:
            grads: For each of ``params``, this rank's gradient; None for none.
            header: This worker's header, with errors found so far.
            grad_scale: Factor for gradients; ranks may differ in it.

        Returns:
            A gradient for each of ``own``, None where nobody has one; its factor; and the header,
            with the worst error found.
        """
        raise NotImplementedError

    def list_counted(self) -> list[Segment]:
        """List the segments that a norm counts here: the first rank counts shards with copies."""
        own = zip(self.own, self.segments, strict=False)  # none if it cannot vote
        return [segment for param, segment in own if param.copies.is_first]

    def find_changed(self) -> VotingParam | None:
        """Find the first parameter whose gradient differs from the encoded one."""
        return find_changed(self.marks)

    # 2 encode and exchange

    def cast(self, inputs: StepInputs, completion: Completion | None = None) -> Exchanging[Bucket]:
        """Encode this worker's vote, and exchange it.

        Args:
            inputs: The inputs that the buckets share.
            completion: Completion of the last bucket under overlap; None for others.
        """
        if self.matrices is not None:
            self._orthogonalize(self.matrices, inputs)
        if self.can_vote:
            try:
                votes, finite, flags = self._encode_and_read(inputs, completion)
            except DeviceError:
                raise
            except Exception as error:  # noqa: BLE001
                self._refuse(inputs.refuse(self.header, error))
        if not self.can_vote:
            return (
                yield from self._cast_nothing(inputs.coins, completion, nonfinite=inputs.nonfinite)
            )
        if inputs.nonfinite == "abstain":
            votes = self._agree_to_abstain(votes, finite, inputs)
        elif not all(finite):
            self._report(Status.NON_FINITE, inputs, self.own[finite.index(False)])
        present = [segment.grad is not None and not inputs.is_excluded for segment in self.segments]
        if faults.armed:
            inputs.after_encode()
        changed = find_changed(self.marks)
        if changed is not None:
            self._report(Status.GRADIENT_CHANGED, inputs, changed)
        if completion is not None:
            self.header = completion.complete(self.header, *flags)
        if not inputs.keeps_directions:
            self.directions = None
        self.reply = yield from self.exchange(self.header, votes, present, inputs.coins)
        return self

    def abstain(self, header: Header, coins: Coins, *, nonfinite: str) -> Exchanging[Bucket]:
        """Take part in a bucket's exchanges, without voting on any parameter."""
        self.clear()
        self.load_nothing(header)
        if self.matrices is not None:
            self._orthogonalize(self.matrices, None)
        return (yield from self._cast_nothing(coins, nonfinite=nonfinite))

    def _cast_nothing(
        self, coins: Coins, completion: Completion | None = None, *, nonfinite: str
    ) -> Exchanging[Bucket]:
        """Take part in the rest of ``cast``, without voting on any parameter."""
        if completion is not None:
            self.header = completion.complete(self.header, completion.flags.cpu())
        if nonfinite == "abstain":
            _, self.header = self.agree([True] * len(self.own), self.header, overflow=False)
        votes, *_ = self.encode([], coins)
        nobody = [False] * len(self.own)
        self.reply = yield from self.exchange(self.header, votes, nobody, coins)
        return self

    def _report(self, status: Status, inputs: StepInputs, param: VotingParam) -> None:
        """Report a parameter in the header."""
        self.header = with_error(self.header, status, culprit=inputs.rank, position=param.position)

    def _refuse(self, header: Header) -> None:
        """Let this worker not vote, for the reason in the header."""
        self.segments, self.header, self.can_vote = (), header, False

    def _encode_and_read(
        self, inputs: StepInputs, completion: Completion | None
    ) -> tuple[Tensor, Sequence[bool], list[Tensor]]:
        """Encode a vote, and read it together with flags on its device.

        Returns:
            The vote, without bits if this worker's votes do not count; whether each segment is
            finite; and the flags of a completion.
        """
        wants_digest = inputs.wants_digest and self.header.status is Status.OK
        seen = [look_at_gradients(self.kernels, self.segments)] if wants_digest else []
        asked = [] if completion is None else [completion.flags]
        encoded = self.segments if self.directions is None else self.directions
        votes, finite, *read = self.encode(encoded, inputs.coins, *asked, *seen)
        if inputs.is_excluded:
            votes, *_ = self.encode([], inputs.coins)
        if seen:
            digest = digest_gradients(self.segments, read[-1])
            self.header = self.header.amended(gradient_digest=digest)
        return votes, finite.tolist(), read[: len(asked)]

    def encode(self, segments: Sequence[Segment], coins: Coins, *more: Tensor) -> Sequence[Tensor]:
        """Encode this worker's vote, and copy it to host memory for the network.

        Args:
            segments: The segments to vote with.
            coins: The coins of this step.
            more: Tensors to read at the same time, so that there is one wait for the device.

        Returns:
            (n_shards, vote_bytes) uint8; for each segment whether it is finite, (n,) bool;
            ``more``. All on the CPU.

        Raises:
            DeviceError: The device failed.
        """
        kept = (
            [param.worker_state for param in self.params]
            if segments and self.rule.worker_state
            else ()
        )
        if self._is_on_host:
            return *self.vote.encode(self.kernels, segments, kept, coins, device=self.device), *more
        with name_failure(self.device, f"votes on bucket {self.layout.index} were encoded"):
            encoded = self.vote.encode(self.kernels, segments, kept, coins, device=self.device)
            return bring_down([*encoded, *more])

    def _orthogonalize(self, matrices: CutMatrices, inputs: StepInputs | None) -> None:
        """Orthogonalize the matrices that are cut over the ranks of this worker.

        Args:
            matrices: The matrices.
            inputs: The inputs of the step; None where this rank cannot vote.
        """
        own = self.own if self.can_vote else ()
        by_position = {param.position: self.segments[index] for index, param in enumerate(own)}
        can_vote = self.can_vote and inputs is not None
        given, header = matrices.orthogonalize(
            by_position, self.header, inputs if can_vote else None
        )
        if header.status is not Status.OK or not can_vote:
            self._refuse(header)
            return
        dropped = {position for position, segment in given.items() if segment is None}
        self.segments = without_gradients(
            self.segments, [each.position not in dropped for each in own]
        )
        self.directions = [
            given.get(param.position) or segment
            for param, segment in zip(own, self.segments, strict=True)
        ]

    def _agree_to_abstain(
        self, votes: Tensor, finite: Sequence[bool], inputs: StepInputs
    ) -> Tensor:
        """Take the votes that are not finite on some rank of this worker out of an encoded vote."""
        agreed, self.header = self.agree(finite, self.header, overflow=inputs.found_inf)
        self.segments = abstain(self.segments, agreed, rank=inputs.rank, step=self.header.step)
        if agreed != finite:
            # Another rank refused a parameter of which a piece, or shard, was encoded here.
            encoded = self.segments if self.directions is None else self.directions
            votes, *_ = self.encode(without_gradients(encoded, agreed), inputs.coins)
        return votes

    def agree(
        self, finite: Sequence[bool], header: Header, *, overflow: bool
    ) -> tuple[Sequence[bool], Header]:
        """Return for each of ``own`` whether it is finite on all ranks that act as one worker.

        Args:
            finite: Flags of this rank.
            header: This rank's header.
            overflow: Whether a GradScaler has seen an overflow here. Then no shard of this worker
                votes, while a node goes on with the mean of its other ranks.
        """
        if self.inside is None:
            return finite, header
        flags = torch.tensor(finite, dtype=torch.bool, device="cpu") & (not overflow)
        header, gathered = gather_flags(self.inside, flags, header)
        return gathered.all(0).tolist(), header

    def exchange(
        self, header: Header, votes: Tensor, present: Sequence[bool], coins: Coins
    ) -> Exchanging[Reply]:
        """Send the votes and return the reply."""
        sent = header.amended(sender=self.link.rank)
        ballot = Ballot(sent, votes, torch.tensor(present, dtype=torch.bool, device="cpu"))
        counted = BucketCount(self.vote, self.link.kernels, coins)
        return self.pattern.exchange(self.link, self.vote.shape, ballot, counted)

    # 3 commit

    def commit(self, coefficients: Sequence[Coefficients], rounding: Coin | None) -> None:
        """Apply the reply to the parameters, and move the momenta that are kept here."""
        payload, present = self.place_reply(self.reply.payload), self.reply.present.tolist()
        self.vote.commit(self.kernels, self.segments, present, payload, rounding)
        for index, param in enumerate(self.params):
            if self.segments[index].param is not param.param:
                param.write_back(self.segments[index].param)

    def place_reply(self, payload: Tensor) -> Tensor:
        """Return a reply's bytes on the parameters' device."""
        return payload if self._is_on_host else bring_up(payload, self.device)

    def list_replies(self) -> list[ParameterReply]:
        """List the replies on ``own``."""
        return self.read_replies(self.reply)

    def read_replies(self, reply: Reply) -> list[ParameterReply]:
        """List the replies on the parameters from a reply."""
        positions = [param.position for param in self.params]
        return self.vote.list_replies(reply.payload, reply.present.tolist(), positions)

    def list_voted(self) -> list[int]:
        """List the positions of the parameters of which some worker voted on a piece."""
        return self.read_voted(self.reply)

    def read_voted(self, reply: Reply) -> list[int]:
        """List the positions of the parameters on which a reply shows votes."""
        present = zip(self.params, reply.present.tolist(), strict=True)
        return [param.position for param, n_votes in present if n_votes]

    # Between steps

    def send_rule_state(self, link: Transport, header: Header) -> Exchanging[Reply] | None:
        """Send this rank's rule state to the ranks that count, over a link with a longer timeout.

        Needed if the counters' state no longer follows from earlier votes: after a state was
        loaded, parameters were placed anew, or replicas were repaired. Every rank must call it.

        Returns:
            The exchange; None if the rule, or this rank, keeps no state.
        """
        if not (self.rule.worker_state and self.params):
            return None
        ballot = Ballot(
            header.amended(bucket=self.layout.index, sender=link.rank),
            self.vote.export_state([param.worker_state for param in self.params]),
            torch.ones(len(self.layout.slots), dtype=torch.bool, device="cpu"),
        )
        return self.pattern.exchange(link, self.vote.state_shape, ballot, _StateImport(self.vote))


@dataclass(frozen=True)
class _StateImport:
    """A reducer that passes worker state to a counter, and replies zeros."""

    vote: BucketVote

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        self.vote.import_states(votes)
        shape = self.vote.state_shape
        n_shards = votes.shape[1] // shape.vote_bytes
        return torch.zeros(n_shards * shape.reply_bytes, dtype=torch.uint8, device="cpu")

    def count_present(self, present: Tensor) -> Tensor:
        return present.sum(0)


class Pipeline(Generic[T]):
    """Exchanges that take turns, in a sequence that depends only on their order and sizes.

    Each new one sends before the earlier ones wait, and each of these goes one round further:

        votes of bucket 1 | votes of 2, replies of 1 | votes of 3, replies of 2 | replies of 3

    So all ranks start the same collectives in the same order, as long as all add the same buckets.
    Small transfers are held, and those of all buckets travel together.

    Args:
        at_once: Whether held transfers begin with each new exchange, because there is time before
            the next one; equal on all ranks.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._under_way: dict[int, Exchanging[T]] = {}  # the oldest first
        self._transfers: dict[int, Transfer | None] = {}  # which they are about to wait for
        self._results: dict[int, T] = {}

    def add(self, exchanging: Exchanging[T]) -> None:
        """Start an exchange, then take each earlier one whose bytes are under way a round further.

        Raises:
            DistlionError: Any error of one of them; the pipeline is then unusable.
        """
        earlier, number = list(self._under_way), len(self._under_way) + len(self._results)
        self._under_way[number] = exchanging
        self._advance(number)
        for each in earlier:
            if not self._is_held(each):
                self._advance(each)
        if self._at_once:
            for transfer in self._transfers.values():
                if transfer is not None:
                    transfer.begin()

    def drain(self) -> list[T]:
        """Complete all exchanges, and return their results in the order of ``add``."""
        while self._under_way:
            for number in list(self._under_way):
                self._advance(number)
        return list(map(self._results.__getitem__, range(len(self._results))))

    def _is_held(self, number: int) -> bool:
        transfer = self._transfers[number]
        return transfer is not None and transfer.is_held

    def _advance(self, number: int) -> None:
        try:
            self._transfers[number] = next(self._under_way[number])
        except StopIteration as end:
            self._results[number] = end.value
            del self._under_way[number]
            self._transfers.pop(number, None)


def run_all(exchanges: Iterable[Exchanging[T]]) -> list[T]:
    """Run exchanges through one pipeline; each is made when its turn to start comes."""
    pipeline = Pipeline[T]()
    for exchanging in exchanges:
        pipeline.add(exchanging)
    return pipeline.drain()


def cast_votes(buckets: Sequence[Bucket], inputs: StepInputs, stages: Sequence[Stage]) -> None:
    """Load and cast the votes on all buckets; one bucket's votes travel while the next is encoded.

    Args:
        buckets: The buckets, in the order of their exchanges.
        inputs: The inputs that they share.
        stages: The stages of the step.
    """
    pipeline = Pipeline[Bucket]()
    waiting = [stage for stage in stages if stage.needs_all] if stages else []
    if waiting:
        for bucket in buckets:
            bucket.load(inputs)
        for stage in waiting:
            stage.before(buckets, inputs)
    for bucket in buckets:
        if not waiting:
            bucket.load(inputs)
        pipeline.add(bucket.cast(inputs))
    pipeline.drain()


def judge(buckets: Sequence[Bucket]) -> Verdict:
    """Join the verdicts on all buckets; OK if there is no error, or no bucket."""
    noted = [
        bucket.reply.verdict
        for bucket in buckets
        if bucket.reply.verdict.status is not Status.OK or bucket.reply.verdict.ends_epoch
    ]
    return worst_of(noted) if noted else Verdict(Status.OK)


def check_unchanged(buckets: Sequence[Bucket], *, rank: int, step: int) -> None:
    """Raise GradientChangedError if a gradient differs from the one that was voted with."""
    for bucket in buckets:
        changed = find_changed(bucket.marks)
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
