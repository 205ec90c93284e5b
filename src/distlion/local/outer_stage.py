"""The outer step of local steps, as a stage of the optimizer that votes on deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event

from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.failures import Status
from distlion.local.outer_step import OuterMomentum, OuterStep
from distlion.local.parts import take_turns
from distlion.step.alone import check_finite, gather_alone
from distlion.step.bucket import abstain
from distlion.step.inputs import StepInputs
from distlion.step.outcome import describe_problem
from distlion.step.param import VotingParam
from distlion.step.stage import Replied, Stage
from distlion.wire.verdict import Verdict


class OuterStage(Stage):
    """Turn a step of the voter, whose gradients are deltas, into the outer step.

    A step is one of ``DistributedLion``: it is committed on all workers, or x does not change and
    all raise the same error. The outer momentum and ``on_commit`` are part of the commit.

    Args:
        outer: The outer step.
        lines: Further lines that must be equal on all workers.
        parts: Parts of the parameters, which take turns to vote: part s % ``parts`` in step s.
        on_commit: Function called at the end of a commit.

    Attributes:
        outer: As given.
        momentum: The momentum of the outcomes.
        has_entered: Event that is set once a vote has begun its exchange.
    """

    takes_scales = True

    def __init__(
        self,
        outer: OuterStep,
        lines: Sequence[str] = (),
        *,
        parts: int,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.outer, self.momentum, self.has_entered = outer, OuterMomentum(outer, []), Event()
        self._lines, self._n_parts, self._on_commit = [*outer.describe(), *lines], parts, on_commit
        self._moving: list[Tensor] = []
        self._voted_alone: Sequence[int] = ()
        self._calls = 0
        self._problem: InvalidArgumentError | None = None

    def prepare(self, calls: int, problem: InvalidArgumentError | None) -> None:
        """Set what this worker tells the others in the next vote.

        Args:
            calls: Number of calls of ``step()``, which must be equal on all workers.
            problem: Reason why this worker cannot vote, which all workers then raise; or None.
        """
        self._calls, self._problem = calls, problem

    def list_lines(self) -> list[str]:
        return self._lines

    def list_passing(self) -> list[str]:
        self.has_entered.set()
        return [f"calls of step() so far: {self._calls}"]

    def place(self, params: list[VotingParam]) -> list[VotingParam]:
        """Let parts take turns."""
        return take_turns(params, self._n_parts)

    def lay_out(self, params: Sequence[VotingParam]) -> None:
        """Give new parameters an outer momentum."""
        self._moving = [param.param for param in params]
        self.momentum.cover(self._moving)

    def begin(self, params: Sequence[VotingParam], step: int) -> None:
        """Remember the values of the parameters that vote."""
        turn = step % self._n_parts
        self.momentum.begin(self._moving, [param.turn == turn for param in params])

    def end(self) -> None:
        """Drop the remembered values."""
        self.momentum.forget()
        self._voted_alone = ()

    def amend(self, inputs: StepInputs) -> StepInputs:
        """Count coins by the votes on the part, and report this worker's problem.

        Coins of successive votes on an element then cancel out.
        """
        number = inputs.header.step // self._n_parts
        inputs = replace(inputs, coins=replace(inputs.coins, step=number))
        if self._problem is None or inputs.header.status is not Status.OK:
            return inputs
        return inputs.refused(self._problem)

    def commit(self, buckets: Sequence[Replied]) -> None:
        """Finish the outer step."""
        voted = set(self._voted_alone)
        for bucket in buckets:
            voted.update(bucket.list_voted())
        self.momentum.finish(self._moving, voted)
        self._on_commit()

    def move_alone(self, params: Sequence[VotingParam], inputs: StepInputs) -> Verdict | None:
        """Move by this worker's delta; without other workers nothing is rounded to bits.

        Equation:
            u = d, in place of s * S
        """
        if self.outer.kind == "lion":
            return None
        header = inputs.header
        if header.status is not Status.OK:
            return Verdict.of(header)
        try:
            segments = gather_alone(params, inputs.coefficients, step=header.step)
        except Exception as error:  # noqa: BLE001
            inputs.problems.append(describe_problem(error))
            return Verdict(Status.INPUT, (inputs.rank,))
        finite = check_finite(segments)
        if inputs.nonfinite == "abstain":
            segments = list(abstain(segments, finite, rank=inputs.rank, step=header.step))
        elif not all(finite):
            return Verdict(Status.NON_FINITE, (inputs.rank,), finite.index(False))
        self._voted_alone = [n for n, each in enumerate(segments) if each.grad is not None]
        for param, segment in zip(params, segments, strict=True):
            if segment.grad is not None:
                segment.param.sub_(segment.grad * segment.coefficients.lr)
                param.write_back(segment.param)
        return Verdict(Status.OK)
