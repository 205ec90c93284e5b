"""Averages of momenta over workers: their settings, their exchange, and the stage of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.failures import Status
from distlion.kernels.contract import Kernels, Segment
from distlion.layout import FLOAT_BYTES, SCALE_ELEMENTS, BucketShape, shape_momenta
from distlion.step.bucket import run_all
from distlion.step.param import VotingParam
from distlion.step.sample import draw_sample, measure_coherence, place_sample, split_rows
from distlion.step.staging import read_together
from distlion.wire.frame import Header
from distlion.wire.node_frames import share_verdict
from distlion.wire.numbers import gather_sample, plan_sample
from distlion.wire.pattern import Ballot, Exchange, Exchanging, Reply
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict, worst_of

SYNC_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
ALL, AUTO = "all", "auto"
# "auto" looks once momenta have formed, then at intervals.
_FIRST_LOOK = 16
_LOOK_EVERY = 2048
# Steps without averaging up to a look. With beta2 = 0.99, a lasting difference between workers is
# back to 1 - 0.99^256 = 92 % by then, and the square of one that is noise to 1 - 0.99^512 = 99 %.
_REST = 256


@dataclass(frozen=True)
class MomentumSync:
    """Average momenta over workers at intervals, so that their votes agree more.

    Equation:
        after a step, for the elements whose turn it is:  m_i = (1 / N) sum_j m_j
        bfloat16, int8:  m_i = m_i + ((1 / N) sum_j Q(m_j) - Q(m_i)), Q rounds to ``dtype``
        (Lion Cub, arXiv:2411.16462: momentum synchronization of some layers, every k steps.)

    Args:
        every: k; every element is averaged once in k steps.
        schedule: "exponential" in place of ``every``: once within the steps 2^i to 2^(i+1) - 1,
            for i = 0, 1, 2, ..., so that intervals double.
        select: "all"; a name or pattern of parameters ("*.attn.*", as in ``fnmatch``) or several;
            ``callable(name, param) -> bool``, the same on all workers; or "auto": those whose
            momenta differ most between workers.
        dtype: Dtype of the momenta that are sent: torch.float32, torch.bfloat16 or torch.int8 (with
            a scale for every 256 elements). Means are returned in float32.
        stagger: Average 1 / k of the elements in each step, instead of all in every k-th step: the
            same traffic, spread evenly over steps.
        share: With "auto", the share of all elements to average, above 0 and up to 1.

    Raises:
        InvalidArgumentError: A value is out of range, or both or neither of ``every`` and
            ``schedule`` are given.
        UnsupportedTypeError: A value is of a wrong type.

    Notes:
        Except for rounding, the mean of the momenta, and so global Lion's direction, does not
        change: averaging only removes the workers' differences, up to the rounding error of Q. Sums
        are added in float32 in rank order. "auto" compares ||mean_i m_i||^2 with mean_i ||m_i||^2
        after 16 steps, then after 2,048, 4,096, ... It sends only 256 elements of each parameter.
        It averages nothing in the first 16 steps and in the last 256 before a look, as freshly
        averaged momenta would look alike. Such steps do not count for ``every`` and ``schedule``.
    """

    every: int | None = None
    schedule: Literal["exponential"] | None = None
    select: str | Sequence[str] | Callable[[str, Tensor], bool] = ALL
    dtype: torch.dtype = torch.float32
    stagger: bool = True
    share: float = 0.5

    def __post_init__(self) -> None:
        self._check_interval()
        if self.dtype not in SYNC_DTYPES:
            raise InvalidArgumentError(
                f"MomentumSync(dtype={self.dtype}): expected torch.float32, torch.bfloat16 or "
                "torch.int8"
            )
        if not isinstance(self.stagger, bool):
            raise UnsupportedTypeError(f"MomentumSync(stagger={self.stagger!r}): expected a bool")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise UnsupportedTypeError(f"MomentumSync(share={self.share!r}): expected a number")
        if not 0 < self.share <= 1:
            raise InvalidArgumentError(
                f"MomentumSync(share={self.share}): expected a number above 0 and up to 1"
            )
        if self.share != type(self).share and self.select != AUTO:
            raise InvalidArgumentError(
                f"MomentumSync(share={self.share}) belongs to select='auto'; select is "
                f"{self.select!r}"
            )
        if callable(self.select) or isinstance(self.select, str):
            return
        if not isinstance(self.select, Sequence) or not all(
            isinstance(pattern, str) for pattern in self.select
        ):
            raise UnsupportedTypeError(
                f"MomentumSync(select={self.select!r}): expected 'all', 'auto', patterns, or a "
                "callable"
            )
        if not self.select:
            raise InvalidArgumentError("MomentumSync(select=()) selects nothing")
        object.__setattr__(self, "select", tuple(self.select))

    def _check_interval(self) -> None:
        if (self.every is None) == (self.schedule is None):
            raise InvalidArgumentError(
                f"MomentumSync(every={self.every!r}, schedule={self.schedule!r}): expected one of "
                "the two, such as every=100 or schedule='exponential'"
            )
        if self.schedule not in (None, "exponential"):
            raise InvalidArgumentError(
                f"MomentumSync(schedule={self.schedule!r}): expected 'exponential'"
            )
        if self.every is None:
            return
        if not isinstance(self.every, int) or isinstance(self.every, bool):
            raise UnsupportedTypeError(f"MomentumSync(every={self.every!r}): expected an integer")
        if self.every < 1:
            raise InvalidArgumentError(f"MomentumSync(every={self.every}): expected 1 or more")

    def part(self, step: int, n_elements: int) -> tuple[int, int]:
        """Return the elements that are averaged after a step, as (start, stop).

        Args:
            step: Number of the step, counted from 0.
            n_elements: Number of selected elements, in the order of the parameters.
        """
        count = step + 1
        if self.select == AUTO:
            if _is_at_rest(count):
                return 0, 0
            count = _count_active(count)
        if self.every is None:  # within an interval as long as all earlier ones together
            interval = 1 << (count.bit_length() - 1)
            turn = count - interval
        else:
            interval, turn = self.every, (count - 1) % self.every
        if self.stagger:
            return n_elements * turn // interval, n_elements * (turn + 1) // interval
        return (0, n_elements) if turn == interval - 1 else (0, 0)

    def is_measured(self, step: int) -> bool:
        """Return whether "auto" looks at the momenta after a step."""
        done = step + 1
        return self.select == AUTO and (done == _FIRST_LOOK or done % _LOOK_EVERY == 0)

    def choose(self, params: Sequence[VotingParam]) -> list[bool]:
        """Return for each trainable parameter whether it is selected, before any measurement.

        Raises:
            InvalidArgumentError: No parameter is selected.
        """
        select = self.select
        if select in (ALL, AUTO):
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
        return (
            f"MomentumSync(every={self.every!r}, schedule={self.schedule!r}, select={select!r}, "
            f"dtype={self.dtype}, stagger={self.stagger}, share={self.share!r})"
        )


def _is_at_rest(done: int) -> bool:
    """Return whether "auto" averages nothing in a step, counted from 1."""
    return done <= _FIRST_LOOK or -done % _LOOK_EVERY < _REST


def _count_active(done: int) -> int:
    """Count the steps not at rest up to and including this one."""
    blocks, within = divmod(done, _LOOK_EVERY)
    return (_LOOK_EVERY - _REST) * blocks + within - _FIRST_LOOK


def choose_least_coherent(
    coherences: Sequence[float], sizes: Sequence[int], share: float
) -> list[bool]:
    """Choose the parameters whose momenta differ most, until they make up a share.

    Args:
        coherences: ||mean_i m_i||^2 / mean_i ||m_i||^2 of each, 1 where workers agree.
        sizes: Number of elements of each.
        share: Share of all elements; the last parameter may exceed it.
    """
    order = sorted(range(len(sizes)), key=lambda index: coherences[index])
    chosen, missing = [False] * len(sizes), share * sum(sizes)
    for index in order:
        if missing <= 0:
            break
        chosen[index] = True
        missing -= sizes[index]
    return chosen


_LARGEST = 127.0


class MomentumSlice(NamedTuple):
    """A range of elements of one parameter's momentum."""

    position: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a flat view of these elements of a parameter, or of a tensor of its shape."""
        return tensor.view(-1)[self.start : self.stop]


@dataclass(frozen=True)
class MomentumRows:
    """The momenta that one exchange moves, and their format: every worker sends one row.

    Attributes:
        slices: The slices of the row, in order.
        dtype: Dtype on the wire: float32, bfloat16 or int8.
        n_workers: Number of workers, each the owner of a shard of the row.
    """

    slices: tuple[MomentumSlice, ...]
    dtype: torch.dtype
    n_workers: int

    @property
    def n_elements(self) -> int:
        """Number of elements that are averaged."""
        return sum(part.stop - part.start for part in self.slices)

    @property
    def shape(self) -> BucketShape:
        """Sizes on the wire."""
        return shape_momenta(self.n_elements, self.n_workers, self.dtype)

    @property
    def up_bits(self) -> float:
        """Bits that each worker sends for its elements, scales included."""
        scale_bytes = FLOAT_BYTES / SCALE_ELEMENTS if self.dtype is torch.int8 else 0
        return self.n_elements * 8 * (self.dtype.itemsize + scale_bytes)

    @property
    def down_bits(self) -> int:
        """Bits of their means, which each worker receives."""
        return self.n_elements * 8 * FLOAT_BYTES

    @property
    def shard_elements(self) -> int:
        """Elements of a shard, padding included."""
        return self.shape.reply_bytes // 4

    def join(self, momenta: Sequence[Tensor]) -> Tensor:
        """Join slices of momenta into (n_workers, shard_elements) float32, padded with 0."""
        row = torch.cat([momentum.view(-1).float() for momentum in momenta])
        n_padded = self.n_workers * self.shard_elements
        padded = torch.nn.functional.pad(row, (0, n_padded - row.numel()))
        return padded.view(self.n_workers, -1)

    def encode(self, row: Tensor) -> Tensor:
        """Encode a row: (n_workers, shard_elements) float32 to (n_workers, vote_bytes) uint8.

        Equation:
            int8: q = round(m / s), s = max |m| / 127 over 256 elements in float32; s = 0 sends 0
        """
        if self.dtype is not torch.int8:
            return row.to(self.dtype).view(torch.uint8)
        blocks = row.view(self.n_workers, -1, SCALE_ELEMENTS)
        scales = blocks.abs().amax(-1, keepdim=True) / row.new_tensor(_LARGEST)
        levels = torch.where(scales > 0, blocks / scales, 0.0).round().clamp(-_LARGEST, _LARGEST)
        encoded = torch.cat(
            [
                levels.to(torch.int8).view(self.n_workers, -1).view(torch.uint8),
                scales.view(self.n_workers, -1).view(torch.uint8),
            ],
            dim=1,
        )
        padding = self.shape.vote_bytes - encoded.shape[1]
        return torch.nn.functional.pad(encoded, (0, padding))

    def decode(self, encoded: Tensor) -> Tensor:
        """Invert ``encode``: (..., vote_bytes) uint8 to (..., shard_elements) float32."""
        if self.dtype is not torch.int8:
            return encoded.view(self.dtype).float()
        n = self.shard_elements
        levels = encoded[..., :n].contiguous().view(torch.int8).float()
        scale_bytes = 4 * n // SCALE_ELEMENTS
        scales = encoded[..., n : n + scale_bytes].contiguous().view(torch.float32)
        blocks = levels.view(*levels.shape[:-1], -1, SCALE_ELEMENTS) * scales[..., None]
        return blocks.view(levels.shape)

    @property
    def parts(self) -> None:
        """None, as momenta are floats, which are added in rank order and not in parts."""
        return None

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

    def count_present(self, present: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Count the workers that sent each part."""
        return present.sum(0)

    def settle(self, row: Tensor, reply: Tensor) -> list[tuple[MomentumSlice, Tensor]]:
        """Return each slice with a worker's averaged momentum, flat float32.

        Args:
            row: The result of ``join``.
            reply: (n_workers, reply_bytes) uint8.
        """
        mean = reply.reshape(-1).view(torch.float32).view_as(row)
        if self.dtype is not torch.float32:
            mean = row + (mean - self.decode(self.encode(row)))
        sizes = [part.stop - part.start for part in self.slices]
        parts = torch.split(mean.view(-1)[: self.n_elements], sizes)
        return [(part, parts[index]) for index, part in enumerate(self.slices)]

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


def cut_slices(
    sync: MomentumSync, step: int, selected: Sequence[VotingParam]
) -> tuple[MomentumSlice, ...]:
    """Cut the slices that a step averages out of the selected parameters.

    Args:
        sync: The settings of the averages.
        step: Number of the step, counted from 0.
        selected: The parameters that are averaged.
    """
    first, last = sync.part(step, sum(param.n_kept for param in selected))
    slices = []
    start = 0
    for param in selected:
        stop = start + param.n_kept
        low, high = max(first, start), min(last, stop)
        if low < high:
            slices.append(MomentumSlice(param.position, low - start, high - start))
        start = stop
    return tuple(slices)


def new_momentum(segment: Segment, index: slice | Tensor, kernels: Kernels) -> Tensor:
    """Compute some elements of a momentum as a commit will write them, without changing anything.

    Args:
        segment: The parameter; without a gradient its momentum stays.
        index: Index into the flat parameter.
        kernels: The arithmetic.
    """
    moved = segment.exp_avg.view(-1)[index].clone()
    if segment.grad is not None:
        slot = segment.slot._replace(n_elements=moved.numel())
        param, grad = segment.param.view(-1)[index], segment.grad.view(-1)[index]
        kernels.update_momentum([Segment(slot, param, grad, moved, segment.coefficients)], [1])
    return moved


SELECTED_KEY = "momentum_selected"
"""Key of a param group, with "auto": 1 for each parameter that is averaged, else 0."""


@dataclass(frozen=True)
class AveragedMomenta:
    """The averaged momenta of one step.

    Attributes:
        verdict: The verdict of all workers.
        means: Momenta to write once the step is committed, flat float32.
        selected: With "auto", the new selection from the next step on; None for no change.
    """

    verdict: Verdict
    means: tuple[tuple[MomentumSlice, Tensor], ...] = ()
    selected: Sequence[bool] | None = None


class MomentumStage:
    """The schedule of momentum averages over the trainable parameters.

    Args:
        sync: The settings of the averages.
        groups: The optimizer's param groups, which remember the selection of "auto".
        params: The trainable parameters.
        n_workers: Number of workers that average, at least 2.
        seed: Seed of the sample, equal on all workers.

    Raises:
        InvalidArgumentError: Nothing is selected.
    """

    def __init__(
        self,
        sync: MomentumSync,
        groups: Sequence[Mapping[str, Any]],
        params: Sequence[VotingParam],
        *,
        n_workers: int,
        seed: int,
    ) -> None:
        self.sync = sync
        self._params = params
        self._n_workers = n_workers
        self._sample = draw_sample(params, seed) if sync.select == AUTO else []
        self._places = place_sample(self._sample, params)
        self._selected = sync.choose(params)
        if sync.select == AUTO:
            remembered = _read_selected(groups)
            self._selected = [remembered.get(param.param, True) for param in params]

    def list_rows(self, step: int) -> list[MomentumRows]:
        """List the momenta to average after a step: a row for each device that has some of them."""
        rows = []
        for device in dict.fromkeys(param.device for param in self._params):
            selected = [
                param
                for param in self._params
                if self._selected[param.position] and param.device == device
            ]
            slices = cut_slices(self.sync, step, selected)
            if slices:
                rows.append(MomentumRows(slices, self.sync.dtype, self._n_workers))
        return rows

    def plan(self, step: int, pattern: Exchange, rank: int) -> ByteCount:
        """Declare the bytes that a rank sends for it in a step."""
        total = sum((pattern.plan(rows.shape, rank) for rows in self.list_rows(step)), ByteCount())
        if self.sync.is_measured(step):
            total += plan_sample(sum(map(len, self._sample)), self._n_workers)
        return total

    def take_sample(self, momentum_of: Callable[[int, Tensor], Tensor]) -> list[float]:
        """List a worker's momenta at the sample.

        Args:
            momentum_of: Function that returns a parameter's momenta, by position and flat indices.
        """
        return read_together(
            [
                momentum_of(position, index).double()
                for position, index in enumerate(self._places)
                if len(index)
            ]
        )

    def select_dispersed(self, rows: Sequence[Sequence[float]]) -> list[bool]:
        """Select anew, by the results of ``take_sample`` on every worker."""
        coherences = [measure_coherence(part) for part in split_rows(rows, self._sample)]
        sizes = [param.n_kept for param in self._params]
        return choose_least_coherent(coherences, sizes, self.sync.share)

    def remember(self, selected: Sequence[bool], groups: Sequence[dict[str, Any]]) -> None:
        """Average these parameters from now on, also after a checkpoint."""
        self._selected = list(selected)
        chosen = {param.param: selected[param.position] for param in self._params}
        for group in groups:
            group[SELECTED_KEY] = [int(chosen.get(param, False)) for param in group["params"]]

    def exchange(
        self,
        segments: Mapping[int, tuple[Segment, Kernels]],
        link: Transport,
        pattern: Exchange,
        header: Header,
        inside: Transport | None,
    ) -> AveragedMomenta:
        """Exchange this step's momenta: 1 compare samples, 2 average rows, 3 agree in nodes.

        Args:
            segments: By position, the segments that this worker commits, with their arithmetic.
            link: The link between voters.
            pattern: The exchange pattern.
            header: This worker's header, with the first free bucket number.
            inside: The link between the ranks of this node; None without nodes.

        Returns:
            The result; momenta and selection have a meaning only if its verdict is OK.
        """
        # 1 compare samples
        selected = None
        if self.sync.is_measured(header.step):
            header, selected = self._compare_samples(segments, header, link=link, inside=inside)

        # 2 average rows
        moved = []
        for number, rows in enumerate(self.list_rows(header.step)):
            momenta = [
                _momentum_at(segments[part.position], slice(part.start, part.stop))
                for part in rows.slices
            ]
            row = rows.join(momenta).to(link.wire_device)
            sent = replace(header, bucket=header.bucket + number)
            moved.append((rows, row, rows.exchange(link, pattern, sent, row)))
        replies = run_all(exchanging for _, _, exchanging in moved)
        verdict = worst_of([Verdict.of(header), *(reply.verdict for reply in replies)])

        # 3 agree in nodes: each of its ranks has averaged another part
        if inside is not None:
            verdict = share_verdict(inside, verdict, header, n_voters=self._n_workers)
        if verdict.status is not Status.OK:
            return AveragedMomenta(verdict)
        means = tuple(
            pair
            for index, (rows, row, _) in enumerate(moved)
            for pair in rows.settle(row, replies[index].payload)
        )
        return AveragedMomenta(verdict, means, selected)

    def _compare_samples(
        self,
        segments: Mapping[int, tuple[Segment, Kernels]],
        header: Header,
        *,
        link: Transport,
        inside: Transport | None,
    ) -> tuple[Header, list[bool] | None]:
        """Return the header with peers' errors, and a selection if there are none."""
        numbers = self.take_sample(lambda position, index: _momentum_at(segments[position], index))
        header, everybody = gather_sample(link, inside, numbers, header)
        if header.status is not Status.OK:
            return header, None
        return header, self.select_dispersed(everybody)


def _momentum_at(committed: tuple[Segment, Kernels], index: slice | Tensor) -> Tensor:
    segment, kernels = committed
    return new_momentum(segment, index, kernels)


def _read_selected(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, bool]:
    return {
        param: bool(group[SELECTED_KEY][index])
        for group in groups
        if SELECTED_KEY in group
        for index, param in enumerate(group["params"])
    }


def fill_selection(groups: Sequence[dict[str, Any]], sync: MomentumSync | None) -> None:
    """Let "auto" begin with all parameters in groups that were saved without a selection."""
    if sync is not None and sync.select == AUTO:
        for group in groups:
            group.setdefault(SELECTED_KEY, [1] * len(group["params"]))


def describe_selection(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line for each group that has a selection."""
    return [
        f"momenta selected in group {number}: {list(group[SELECTED_KEY])}"
        for number, group in enumerate(groups)
        if SELECTED_KEY in group
    ]
