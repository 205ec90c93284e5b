"""Averages of momenta over workers: their settings, their exchange, and the stage of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.failures import Status
from distlion.kernels.contract import Segment
from distlion.kernels.reference import Kernels
from distlion.layout import FLOAT_BYTES, BucketShape, shape_momenta
from distlion.numpy_numbers import keep_as_python
from distlion.step.arguments import check_count
from distlion.step.bucket import Bucket, run_all
from distlion.step.param import VotingParam
from distlion.step.stage import Stage, Surroundings
from distlion.wire.all_reduce import AllReduce
from distlion.wire.frame import Header
from distlion.wire.node_frames import share_verdict
from distlion.wire.pattern import Ballot, Exchange, Exchanging, Reply
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict, worst_of

SYNC_DTYPES = (torch.float32, torch.bfloat16)
ALL = "all"
_ROW_ELEMENTS = 1 << 24
"""Most elements of several parameters in a row, so that frames of a large model stay small."""


@dataclass(frozen=True)
class MomentumSync:
    """Average momenta over workers at intervals, so that their votes agree more.

    Equation:
        after every k-th step, for the selected parameters:  m_i = (1 / N) sum_j m_j
        bfloat16:  m_i = m_i + ((1 / N) sum_j Q(m_j) - Q(m_i)), Q rounds to ``dtype``
        (Lion Cub, arXiv:2411.16462: momentum synchronization of some layers, every k steps.)

    Args:
        every: k.
        select: "all"; a name or pattern of parameters ("*.attn.*", as in ``fnmatch``) or several;
            or ``callable(name, param) -> bool``, the same on all workers.
        dtype: Dtype of the momenta that are sent: torch.float32 or torch.bfloat16. Means are
            returned in float32.

    Raises:
        InvalidArgumentError: A value is out of range.
        UnsupportedTypeError: A value is of a wrong type.

    Notes:
        Except for rounding, the mean of the momenta, and so global Lion's direction, does not
        change: averaging only removes the workers' differences, up to the rounding error of Q. Sums
        are added in float32 in rank order.
    """

    every: int
    select: str | Sequence[str] | Callable[[str, Tensor], bool] = ALL
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        keep_as_python(self, "every")
        check_count("MomentumSync.every", self.every)
        if self.dtype not in SYNC_DTYPES:
            raise InvalidArgumentError(
                f"MomentumSync(dtype={self.dtype}): expected torch.float32 or torch.bfloat16"
            )
        if callable(self.select) or isinstance(self.select, str):
            return
        if not isinstance(self.select, Sequence) or not all(
            isinstance(pattern, str) for pattern in self.select
        ):
            raise UnsupportedTypeError(
                f"MomentumSync(select={self.select!r}): expected 'all', patterns, or a callable"
            )
        if not self.select:
            raise InvalidArgumentError("MomentumSync(select=()) selects nothing")
        object.__setattr__(self, "select", tuple(self.select))

    def is_due(self, step: int) -> bool:
        """Return whether momenta are averaged after a step, counted from 0."""
        return (step + 1) % self.every == 0

    def choose(self, params: Sequence[VotingParam]) -> list[bool]:
        """Return for each trainable parameter whether it is selected.

        Raises:
            InvalidArgumentError: No parameter is selected.
        """
        select = self.select
        if select == ALL:
            return [True] * len(params)
        if callable(select):
            chosen = [bool(select(param.name, param.param)) for param in params]
        else:
            patterns = (select,) if isinstance(select, str) else tuple(select)
            chosen = [
                any(fnmatchcase(param.name, pattern) for pattern in patterns) for param in params
            ]
        if not any(chosen):
            known = ", ".join(param.name for param in params[:5])
            known += ", ..." if len(params) > 5 else ""
            raise InvalidArgumentError(
                f"MomentumSync(select={select!r}) selects none of the parameters {known}; give "
                "(name, parameter) pairs to the optimizer, such as model.named_parameters(), to "
                "select by name"
            )
        return chosen

    def describe_choice(self, params: Sequence[VotingParam]) -> str:
        """Describe the selection, as a function may choose differently on other workers."""
        chosen = self.choose(params)
        kept = [param.name for index, param in enumerate(params) if chosen[index]]
        return f"momenta averaged: {', '.join(kept)}"

    def describe(self) -> str:
        """Describe it equally on all workers, without addresses of functions."""
        select = self.select
        if callable(select):
            select = getattr(select, "__qualname__", type(select).__qualname__)
        return f"MomentumSync(every={self.every!r}, select={select!r}, dtype={self.dtype})"


@dataclass(frozen=True)
class MomentumRows:
    """The momenta that one exchange moves, and their format: every worker sends one row.

    Attributes:
        params: The parameters of the row, in order.
        dtype: Dtype on the wire: float32 or bfloat16.
        n_workers: Number of workers, each the owner of a shard of the row.
    """

    params: tuple[VotingParam, ...]
    dtype: torch.dtype
    n_workers: int

    @property
    def n_elements(self) -> int:
        """Number of elements that are averaged."""
        return sum(param.n_kept for param in self.params)

    @property
    def shape(self) -> BucketShape:
        """Sizes on the wire."""
        return shape_momenta(self.n_elements, self.n_workers, self.dtype)

    @property
    def up_bits(self) -> int:
        """Bits that each worker sends for its elements."""
        return self.n_elements * 8 * self.dtype.itemsize

    @property
    def down_bits(self) -> int:
        """Bits of their means, which each worker receives."""
        return self.n_elements * 8 * FLOAT_BYTES

    @property
    def shard_elements(self) -> int:
        """Elements of a shard, padding included."""
        return self.shape.reply_bytes // 4

    def join(self, momenta: Sequence[Tensor]) -> Tensor:
        """Join momenta into (n_workers, shard_elements) float32, padded with 0."""
        row = torch.cat([momentum.view(-1).float() for momentum in momenta])
        n_padded = self.n_workers * self.shard_elements
        padded = torch.nn.functional.pad(row, (0, n_padded - row.numel()))
        return padded.view(self.n_workers, -1)

    def encode(self, row: Tensor) -> Tensor:
        """Encode a row: (n_workers, shard_elements) float32 to (n_workers, vote_bytes) uint8."""
        return row.to(self.dtype).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        """Invert ``encode``: (..., vote_bytes) uint8 to (..., shard_elements) float32."""
        return encoded.view(self.dtype).float()

    def reduce(self, votes: Tensor, present: Tensor, first_shard: int) -> Tensor:
        """Average the workers' rows, added in float32 in rank order; the pattern's reducer.

        The mean is returned in float32 whatever the dtype: coarser rounding would change the mean,
        and with it the direction of global Lion.
        """
        rows = self.decode(votes.contiguous().view(len(votes), -1, self.shape.vote_bytes))
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        # By a tensor: for a number, some backends multiply by the reciprocal.
        return total.div_(total.new_tensor(len(rows))).view(-1).view(torch.uint8)

    def count_present(self, present: Tensor) -> Tensor:
        """Count the workers that sent each part."""
        return present.sum(0)

    def read_means(self, row: Tensor, reply: Tensor) -> list[tuple[VotingParam, Tensor]]:
        """Return each parameter with a worker's averaged momentum, flat float32.

        Args:
            row: The result of ``join``.
            reply: (n_workers, reply_bytes) uint8.
        """
        mean = reply.reshape(-1).view(torch.float32).view_as(row)
        if self.dtype is not torch.float32:
            mean = row + (mean - self.decode(self.encode(row)))
        sizes = [param.n_kept for param in self.params]
        parts = torch.split(mean.view(-1)[: self.n_elements], sizes)
        return list(zip(self.params, parts, strict=True))

    def exchange(
        self, link: Transport, pattern: Exchange, header: Header, row: Tensor
    ) -> Exchanging[Reply]:
        """Send this worker's row and return the mean."""
        ballot = Ballot(
            replace(header, sender=link.rank),
            self.encode(row),
            torch.ones(1, dtype=torch.bool, device="cpu"),
        )
        return pattern.exchange(link, self.shape, ballot, self)


def new_momentum(segment: Segment, kernels: Kernels) -> Tensor:
    """Compute a momentum as a commit will write it, without changing anything.

    Args:
        segment: The parameter; without a gradient its momentum stays.
        kernels: The arithmetic.
    """
    moved = segment.exp_avg.clone()
    if segment.grad is not None:
        kernels.update_momentum([segment._replace(exp_avg=moved)], [1])
    return moved


class MomentumSchedule:
    """The schedule of momentum averages over the trainable parameters.

    Args:
        sync: The settings of the averages.
        params: The trainable parameters.
        n_workers: Number of workers that average, at least 2.

    Raises:
        InvalidArgumentError: Nothing is selected.
    """

    def __init__(
        self, sync: MomentumSync, params: Sequence[VotingParam], *, n_workers: int
    ) -> None:
        self._sync = sync
        chosen = sync.choose(params)
        self._rows = [
            MomentumRows(row, sync.dtype, n_workers)
            for row in _cut_rows([param for param in params if chosen[param.position]])
        ]

    def list_rows(self, step: int) -> Sequence[MomentumRows]:
        """List the momenta to average after a step."""
        return self._rows if self._sync.is_due(step) else ()

    def plan(self, step: int, pattern: Exchange, rank: int) -> ByteCount:
        """Declare the bytes that a rank sends for it in a step."""
        return sum((pattern.plan(rows.shape, rank) for rows in self.list_rows(step)), ByteCount())


class Averaging(Stage):
    """Average momenta over workers.

    Args:
        schedule: The schedule of the averages.
        pattern: The exchange pattern.
        voter: The id of this rank's worker.
        between: The link between voters.
        inside: The link between the ranks of this worker; None for a worker of one rank.
    """

    def __init__(
        self,
        schedule: MomentumSchedule,
        pattern: Exchange,
        voter: int,
        between: Transport,
        inside: Transport | None,
    ) -> None:
        self._schedule, self._pattern, self._voter = schedule, pattern, voter
        self._between, self._inside = between, inside
        self._means: list[tuple[VotingParam, Tensor]] = []

    def exchange(self, buckets: Sequence[Bucket], header: Header) -> tuple[Header, Verdict]:
        """Exchange momenta as the commit will write them: 1 average rows, 2 agree in nodes."""
        # 1 average rows, one after the other; their means wait for the commit
        link, self._means, verdicts = self._between, [], [Verdict.of(header)]
        segments = {
            param.position: (segment, bucket.kernels)
            for bucket in buckets
            for param, segment in zip(bucket.own, bucket.segments, strict=True)
        }
        for number, rows in enumerate(self._schedule.list_rows(header.step)):
            momenta = [new_momentum(*segments[param.position]) for param in rows.params]
            row = rows.join(momenta).to(link.wire_device)
            sent = replace(header, bucket=len(buckets) + number)
            (reply,) = run_all([rows.exchange(link, self._pattern, sent, row)])
            verdicts.append(reply.verdict)
            if reply.verdict.status is Status.OK:
                self._means += rows.read_means(row, reply.payload)
        verdict = worst_of(verdicts)

        # 2 agree in nodes: each of its ranks has averaged another part
        if self._inside is not None:
            n_voters = link.n_members
            verdict = share_verdict(self._inside, verdict, header, n_voters=n_voters)
        return header, verdict

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Write the means."""
        for param, mean in self._means:
            param.exp_avg.view(-1).copy_(mean)
        self._means = []

    def end(self) -> None:
        """Release the means of a step that was given up."""
        self._means = []

    def plan(self, step: int) -> ByteCount:
        return self._schedule.plan(step, self._pattern, self._voter)


def build_averaging(
    sync: MomentumSync | None, exchange: Exchange | Literal["auto"], among: Surroundings
) -> Averaging | None:
    """Build the stage; None if there is nothing to average.

    Raises:
        InvalidArgumentError: ``sync`` selects nothing.
    """
    if sync is None:
        return None
    n_workers = among.ranks.roster.n_voters
    schedule = MomentumSchedule(sync, among.params, n_workers=n_workers)
    if n_workers == 1 or among.between is None:
        return None
    # "auto" chooses for buckets of votes only.
    pattern = AllReduce() if exchange == "auto" else exchange
    return Averaging(schedule, pattern, among.ranks.voter, among.between, among.inside)


def _cut_rows(params: Sequence[VotingParam]) -> list[tuple[VotingParam, ...]]:
    """Cut parameters into rows of one device each; a parameter is never split."""
    rows: list[tuple[VotingParam, ...]] = []
    for device in dict.fromkeys(param.device for param in params):
        n_elements = _ROW_ELEMENTS
        for param in (param for param in params if param.device == device and param.n_kept):
            n_elements += param.n_kept
            if n_elements > _ROW_ELEMENTS:
                rows.append(())
                n_elements = param.n_kept
            rows[-1] += (param,)
    return rows
