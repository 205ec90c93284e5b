"""The votes on a worker's deltas: their schedule, and their effect on the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError, DistlionError, InvalidArgumentError
from distlion.local.arguments import Schedule, find_common_device
from distlion.local.inner_state import find_broken, reset_broken
from distlion.local.late_vote import LateVote
from distlion.local.outer_step import OuterStage, OuterStep
from distlion.local.pairs import (
    LocalPairs,
    Pairs,
    forget_deltas,
    give_common,
    set_deltas,
    take_common,
    undoing_groups,
)
from distlion.local.period import LocalPeriod
from distlion.optim.arguments import label_params
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.gradients import UseWatch
from distlion.step.outcome import describe_problem
from distlion.step.shard_pieces import ShardPieces
from distlion.votes.aggregation import Aggregation


class Progress(NamedTuple):
    """A worker's place between two votes; all but ``begun`` is equal on all workers.

    Attributes:
        calls: Calls of ``step()`` so far.
        since: For each part of the parameters, calls since the last vote on it.
        turn: The part with a late vote whose result is still to be taken; None for none.
        begun: This worker's parameters of that part when its vote began.
    """

    calls: int
    since: Sequence[int]
    turn: int | None = None
    begun: Sequence[Tensor] = ()

    def describe(self) -> str:
        """Describe it in words that must be equal on all workers."""
        since = self.since[0] if len(self.since) == 1 else list(self.since)
        late = "" if self.turn is None else ", and a result to be taken"
        return f"{self.calls} steps, {since} of them since the last vote{late}"


class LocalVotes:
    """Let a worker vote on how far its inner optimizer came, one part after the other.

    Args:
        inner: The optimizer that takes the local steps.
        schedule: The steps at which votes begin, and at which their result is taken.
        outer: The outer step.
        aggregation: The rule for deltas.
        common_device: Device of the common point.
        make: Function that makes the optimizer of the common point, as ``with_stages``.
        **options: Its options.

    Attributes:
        schedule: The given schedule.
        period: The count of steps, and changes made outside of steps.
        pairs: The worker's own parameters, each with its common point.
        stage: The outer step, a stage of that optimizer.
        common: The optimizer of the common point, whose steps are the votes.
    """

    def __init__(
        self,
        inner: Optimizer,
        schedule: Schedule,
        outer: OuterStep,
        aggregation: Aggregation | None,
        *,
        common_device: object,
        make: Callable[..., DistributedLion] = DistributedLion.with_stages,
        **options: Any,
    ) -> None:
        self._inner, self.schedule = inner, schedule
        self._is_plain = outer.is_plain
        self.period = LocalPeriod(schedule.parts)
        self._late: LateVote | None = None
        self._voting: Pairs = ()  # their period ends with the vote under way
        self._abstains = False
        names = label_params(inner.param_groups)
        self.pairs = LocalPairs(find_common_device(common_device))
        self._use = UseWatch("on this worker")
        placed = self.pairs.place(list(names.values()), list(names), known={})
        schedule.check_tensors(self.pairs.own)
        self.stage = OuterStage(
            outer, [schedule.describe()], parts=schedule.parts, on_commit=self._end_period
        )
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
        self.pairs.turns = [param.turn for param in self.common.session.params]
        self.period.know(names)
        take_common(self.pairs.pairs)
        self.period.take(self.pairs.pairs)

    def wait(self) -> DistributedLion:
        """Return the optimizer of the common point, once no vote is under way."""
        if self._late is not None:
            self._late.wait()
        return self.common

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
        step = self.common.known_step
        self.common.session.agree(call, problem, step=step, said=said)

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
        """This worker's place; waits for a vote that is under way."""
        period, late = self.period, self._late
        if late is None or late.has_failed:
            return Progress(period.calls, self._list_since())
        return Progress(period.calls, list(period.since), late.turn, late.begun)

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.period.set_progress(progress.calls, progress.since)
        self._late = None
        if progress.turn is not None:
            pairs = zip(self.pairs.of(progress.turn), progress.begun, strict=True)
            begun = [each.to(param, copy=True) for (param, _), each in pairs]
            self._late = LateVote(begun, progress.turn)

    def _list_since(self) -> list[int]:
        """List the steps since the last vote on each part; one that has failed does not count."""
        since, late = list(self.period.since), self._late
        if late is not None and late.has_failed:
            since[late.turn] += late.steps
        return since

    def count_step(self) -> None:
        """Count a local step; take a result or vote when one is due."""
        self.period.count()
        place = self.period.calls % self.schedule.interval
        if self._late is not None and place == self.schedule.delay:
            self.land()
        if place:
            return
        if self.schedule.delay and not self.is_alone:
            self._begin_late()
        else:
            self.vote_in_turn()

    def watch_use(self) -> None:
        """Warn once of parameters that local steps cannot move, as they have no gradient."""
        if not self._use.is_over:
            names = label_params(self.common.param_groups)
            named = [(names[common], own) for own, common in self.pairs.pairs]
            self._use.observe([own for _, own in named if own.grad is not None], named)

    def _prepare(self) -> int:
        """Set what the next vote carries besides deltas; return the part that votes."""
        self.stage.prepare(self.period.calls, self.period.find_problem(self._inner.param_groups))
        return self.common.known_step % self.schedule.parts

    def _begin_late(self) -> None:
        """Begin a vote that travels while local steps go on."""
        turn = self._prepare()
        self._voting, pairs = (), self.pairs.of(turn)
        steps, self.period.since[turn] = self.period.since[turn], 0
        self._late = LateVote.start(
            self.common, self.stage.has_entered, pairs, self._inner, turn, steps=steps
        )
        self.period.note_begun([param for param, _ in pairs], self._late.begun)

    def land(self) -> None:
        """Take the result of a late vote, or raise its error."""
        self.period.since = self._list_since()
        late, self._late = self._late, None
        if late is not None:
            self.period.check_begin()
            pairs = self.pairs.of(late.turn)
            late.land(pairs)
            self._reset_broken(pairs)
            self._give_up_repaired(but=pairs)

    def vote_in_turn(self) -> None:
        """Vote on the part whose turn it is, and take the result."""
        self._cast_vote()

    def _cast_vote(self) -> bool:
        """Vote on a part; return False if a crew's members changed before anybody voted."""
        turn = self._prepare()
        self._voting = self.pairs.of(turn)
        broken: Sequence[Tensor] | None = None
        if self.period.since[turn] and not self._abstains:
            broken = set_deltas(self._voting, self._inner)
        before = self.common.known_step
        try:
            is_done = self.common.step() is not False
        finally:
            forget_deltas(self._voting)
        if is_done:
            self.period.since[turn] = 0
            if self.common.known_step == before:  # all workers give the period up
                self._begin_anew(self._voting)
            self._give_up_repaired()
            self._reset_broken(self._voting, broken)  # last, as a warning may be an error
        return is_done

    def vote_on_all(self) -> None:
        """Vote in turn on each part for which some worker has taken steps since its last vote."""
        self.land()
        if not any(self.period.since):
            self._agree_on_nothing()
        while any(self.period.since):
            self.vote_in_turn()

    def _agree_on_nothing(self) -> None:
        """Check that all workers are at the common point, where there is nothing to vote on."""
        self.period.check_begin()
        problem = self.period.find_problem(self._inner.param_groups)
        said = f"calls of step() so far: {self.period.calls}"
        self.agree_on("vote()", problem, said)
        self._begin_anew(self.pairs.pairs)

    def _end_period(self) -> None:
        """Begin the next period at the common point; alone with a plain step, stay in place."""
        if not self._voting:  # a late vote: the worker goes on from where it is
            return
        if self._is_plain and self.is_alone:
            give_common(self._voting)
        else:
            take_common(self._voting)
        self.period.take(self._voting)

    def _begin_anew(self, pairs: Pairs) -> None:
        take_common(pairs)
        self.period.take(pairs)

    def _reset_broken(self, pairs: Pairs, broken: Sequence[Tensor] | None = None) -> None:
        """Begin with a fresh inner state where it is not finite, now that the votes are over.

        Args:
            pairs: The parameters that voted.
            broken: Those of them whose state was not finite before; None if nobody has looked.
        """
        if broken is None:
            broken = find_broken(self._inner, [param for param, _ in pairs])
        reset_broken(self._inner, broken, worker=self.common.session.ranks.rank)

    def begin_after_repair(self) -> None:
        """Begin anew if replicas were repaired outside of a vote; a result is taken before."""
        if self._late is None:
            self._give_up_repaired()

    def _give_up_repaired(self, but: Pairs = ()) -> None:
        """Begin anew after a repair of replicas, which the next deltas would otherwise contain."""
        replicas = self.common.session.replicas
        were_repaired, replicas.were_repaired = replicas.were_repaired, False
        if were_repaired:
            kept = {param for param, _ in but}
            self._begin_anew([pair for pair in self.pairs.pairs if pair[0] not in kept])

    def add_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer and to the common point; all workers call it.

        Raises:
            DistlionError: As ``LocalSteps.add_param_group``; nothing changed.
        """
        self.land()  # or the vote under way would not know the new parameters
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
        self.pairs.turns = [param.turn for param in self.common.session.params]
        # Parameters may have moved to another part, so all parts take the largest count.
        self.period.since = [max(self.period.since)] * self.schedule.parts
        self.period.know(label_params(self._inner.param_groups[-1:]))
        added = self.pairs.pairs[len(before) :]
        take_common(added)
        self.period.note_common(added)
