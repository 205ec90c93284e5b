"""The votes on a worker's deltas: when they take place, and their effect on the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError, DistlionError, InvalidArgumentError
from distlion.local.arguments import find_common_device
from distlion.local.inner_state import find_broken, list_made, reset_broken, warn_of_copies
from distlion.local.outer_step import OuterStage, OuterStep
from distlion.local.pairs import (
    LocalPairs,
    forget_deltas,
    give_common,
    set_deltas,
    take_common,
    undoing_groups,
)
from distlion.local.period import LocalPeriod
from distlion.numpy_numbers import as_python
from distlion.optim.arguments import label_params
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.arguments import check_count
from distlion.step.gradients import UseWatch
from distlion.step.outcome import describe_problem
from distlion.step.shard_pieces import ShardPieces
from distlion.votes.aggregation import Aggregation


class Progress(NamedTuple):
    """A worker's place between two votes, equal on all workers.

    Attributes:
        calls: Calls of ``step()`` so far.
        since: Calls since the last vote.
    """

    calls: int
    since: int

    def describe(self) -> str:
        """Describe it in words that must be equal on all workers."""
        return f"{self.calls} steps, {self.since} of them since the last vote"


class LocalVotes:
    """Let a worker vote on how far its inner optimizer came.

    Args:
        inner: The optimizer that takes the local steps.
        every: H, steps from one vote to the next.
        outer: The outer step.
        aggregation: The rule for deltas.
        common_device: Device of the common point.
        make: Function that makes the optimizer of the common point, as ``with_stages``.
        **options: Its options.

    Attributes:
        every: As given.
        period: The count of steps, and changes made outside of steps.
        pairs: The worker's own parameters, each with its common point.
        stage: The outer step, a stage of that optimizer.
        common: The optimizer of the common point, whose steps are the votes.
    """

    def __init__(
        self,
        inner: Optimizer,
        every: int,
        outer: OuterStep,
        aggregation: Aggregation | None,
        *,
        common_device: object,
        make: Callable[..., DistributedLion] = DistributedLion.with_stages,
        **options: Any,
    ) -> None:
        every = as_python(every)
        check_count("every", every)
        self._inner, self.every = inner, every
        self._made_early = list_made(inner)
        self._is_plain = outer.is_plain
        self.period = LocalPeriod()
        self._abstains = False
        names = label_params(inner.param_groups)
        self.pairs = LocalPairs(find_common_device(common_device))
        self._use = UseWatch("on this worker")
        placed = self.pairs.place(list(names.values()), list(names), known={})
        line = f"local steps: a vote every {every}"
        self.stage = OuterStage(outer, [line], on_commit=self._end_period)
        self.common = make(
            [self.stage],
            placed,
            **outer.list_arguments(aggregation),
            **options,
        )
        ranks = self.common.session.ranks
        if ranks.roster.n_voters == 1 and not ranks.is_alone:
            raise InvalidArgumentError(
                f"all {ranks.n_ranks} ranks act as one worker, without another voter. Expected "
                "several workers. Use the inner optimizer alone, or smaller nodes"
            )
        self.period.know(names)
        self._begin_anew()

    @property
    def is_alone(self) -> bool:
        """True if there is no other worker."""
        return self.common.session.ranks.is_alone

    @property
    def shard_pieces(self) -> ShardPieces | None:
        """The form of sharded tensors in states; None where parameters are whole."""
        return self.common.shard_pieces

    def agree(self, call: str, problem: CheckpointError | None, said: str = "") -> None:
        """Raise on all ranks if one of them cannot make a call that all of them make.

        Args:
            call: Name of the call.
            problem: Reason why this rank cannot make it; None for no reason.
            said: A line that must be equal on all ranks; "" on all of them for none.

        Raises:
            CheckpointError: Some rank has a problem, or a different line.
        """
        session, step = self.common.session, self.common.known_step
        session.check_idle(call)
        with session.lifecycle.collective(call):
            session.meetings.agree(call, problem, step=step, said=said)

    def agree_on(self, call: str, problem: Exception | None, said: str = "") -> None:
        """Do the same as ``agree`` in a call that loads nothing.

        Raises:
            InvalidArgumentError: Another rank has a problem, or a different line.
            Exception: ``problem``.
        """
        found = None if problem is None else CheckpointError(describe_problem(problem))
        try:
            self.agree(call, found, said)
        except CheckpointError as error:
            refused = problem or InvalidArgumentError(str(error))
            if isinstance(refused, DistlionError):
                refused.is_recoverable = True
            raise refused from error

    @property
    def progress(self) -> Progress:
        """This worker's place."""
        return Progress(self.period.calls, self.period.since)

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.period.set_progress(progress.calls, progress.since, self.pairs.pairs)

    def count_step(self) -> None:
        """Count a local step; vote when it is due."""
        self.period.count()
        if self.period.calls % self.every == 0:
            self.vote_when_due()

    def watch_use(self) -> None:
        """Warn once of parameters that local steps cannot move, as they have no gradient."""
        if not self._use.is_over:
            names = label_params(self.common.param_groups)
            named = [(names[common], own) for own, common in self.pairs.pairs]
            self._use.observe([own for _, own in named if own.grad is not None], named)

    def vote_when_due(self) -> None:
        """Vote, and begin the next period."""
        self._cast_vote()

    def _cast_vote(self) -> bool:
        """Vote; return False if a crew's members changed before anybody voted."""
        self.stage.prepare(self.period.calls, self.period.find_problem(self._inner.param_groups))
        pairs = self.pairs.pairs
        broken: Sequence[Tensor] | None = None
        if self.period.since and not self._abstains:
            broken = set_deltas(pairs, self._inner)
        before = self.common.known_step
        try:
            is_done = self.common.step() is not False
        finally:
            forget_deltas(pairs)
        if is_done:
            self.period.since = 0
            if self.common.known_step == before:  # all workers give the period up
                self._begin_anew()
            self.give_up_repaired()
            self._reset_broken(broken)  # last, as a warning may be an error
            if (before, self.common.known_step) == (0, 1):
                warn_of_copies(self._inner, self.pairs.own)
        return is_done

    def vote_on_demand(self) -> None:
        """Vote if there was a step since the last vote; else begin anew at the common point."""
        if self.period.since:
            self.vote_when_due()
        else:
            self._agree_on_nothing()

    def _agree_on_nothing(self) -> None:
        """Check that all workers are at the common point, where there is nothing to vote on."""
        self.period.check_begin()
        problem = self.period.find_problem(self._inner.param_groups)
        said = f"calls of step() so far: {self.period.calls}"
        self.agree_on("vote()", problem, said)
        self._begin_anew()

    def _end_period(self) -> None:
        """Begin the next period at the common point; alone with a plain step, stay in place."""
        if self._is_plain and self.is_alone:
            give_common(self.pairs.pairs)
            self.period.take(self.pairs.pairs)
        else:
            self._begin_anew()

    def _begin_anew(self) -> None:
        take_common(self.pairs.pairs)
        self.period.take(self.pairs.pairs)

    @torch.no_grad()
    def begin_at_own(self) -> None:
        """Begin a period at this worker's parameters, which are the same on all workers."""
        for param, common in self.pairs.pairs:
            common.copy_(param)
        self.period.since = 0
        self.period.take(self.pairs.pairs)

    def _reset_broken(self, broken: Sequence[Tensor] | None) -> None:
        """Begin with a fresh inner state where it is not finite, now that the vote is over.

        Args:
            broken: The parameters whose state was not finite before; None if nobody has looked.
        """
        if broken is None:
            broken = find_broken(self._inner, self.pairs.own)
        rank = self.common.session.ranks.rank
        reset_broken(self._inner, broken, made_early=self._made_early, worker=rank)

    def give_up_repaired(self) -> None:
        """Begin anew after a repair of replicas, which the next deltas would otherwise contain."""
        replicas = self.common.session.replicas
        were_repaired, replicas.were_repaired = replicas.were_repaired, False
        if were_repaired:
            self._begin_anew()

    def add_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer and to the common point; all workers call it.

        Raises:
            DistlionError: As ``LocalSteps.add_param_group``; nothing changed.
        """
        before, problem = list(self.pairs.pairs), None
        placed: list[tuple[str, Tensor]] = []
        with undoing_groups(self._inner):
            try:
                placed = self.pairs.add_group(self._inner, param_group)
            except Exception as error:  # noqa: BLE001, the others wait for this worker
                problem = error
            try:
                self.agree_on("add_param_group()", problem)
                self.common.add_param_group({"params": placed})
            except BaseException:
                self.pairs.pairs = before
                raise
        self._made_early |= list_made(self._inner) & {*self._inner.param_groups[-1]["params"]}
        self.period.know(label_params(self._inner.param_groups[-1:]))
        added = self.pairs.pairs[len(before) :]
        take_common(added)
        self.period.take_added(added)
