"""Averages of momenta in an optimizer's steps: exchanged before a commit, applied after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from distlion.failures import Status
from distlion.kernels.contract import Kernels, Segment
from distlion.step.momentum_exchange import MomentumRows, MomentumSlice, cut_slices, new_momentum
from distlion.step.momentum_sync import AUTO, MomentumSync, choose_least_coherent
from distlion.step.param import VotingParam
from distlion.step.sample import draw_sample, measure_coherence, place_sample, split_rows
from distlion.step.staging import read_together
from distlion.step.vote import run_all
from distlion.wire.frame import Header
from distlion.wire.node_frames import share_verdict
from distlion.wire.numbers import gather_sample, plan_sample
from distlion.wire.pattern import Exchange
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict, worst_of

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
