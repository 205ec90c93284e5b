"""The outer step of local steps: its settings, its momentum, and the stage of a vote on deltas."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.failures import Status
from distlion.kernels.coin import Coin
from distlion.kernels.contract import Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.numpy_numbers import keep_as_python
from distlion.step.alone import step_alone
from distlion.step.arguments import check_number, check_positive
from distlion.step.bucket import Bucket
from distlion.step.inputs import StepInputs
from distlion.step.param import VotingParam, local_tensor
from distlion.step.stage import Stage
from distlion.votes.aggregation import Aggregation
from distlion.votes.scaled import ScaledVote
from distlion.wire.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The move of the common point x by a vote on deltas.

    Equation:
        x' = x - lr * (b + ...), see ``OuterMomentum``; u = s * S, the outcome

    Attributes:
        lr: Outer learning rate.
        momentum: Weight of the outer momentum's old value, in [0, 1).
        nesterov: Whether the momentum looks ahead.

    Raises:
        InvalidArgumentError: A number is out of range, or has no effect.
        UnsupportedTypeError: A value is of a wrong kind.
    """

    lr: float
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        keep_as_python(self, "lr", "momentum")
        check_positive("outer_lr", self.lr)
        if not 0 <= check_number("outer_momentum", self.momentum) < 1:
            raise InvalidArgumentError(f"outer_momentum={self.momentum}: expected it in [0, 1)")
        if not isinstance(self.nesterov, bool):
            raise UnsupportedTypeError(f"nesterov={self.nesterov!r}: expected True or False")
        if self.nesterov and not self.momentum:
            raise InvalidArgumentError(
                "nesterov=True looks ahead by a momentum, and outer_momentum is 0. Give one, such "
                "as 0.9, or leave nesterov out"
            )

    def list_arguments(self, aggregation: Aggregation | None) -> dict[str, Any]:
        """List arguments of the optimizer whose steps are the votes on deltas.

        Args:
            aggregation: The given rule; None for the default.

        Raises:
            InvalidArgumentError: The rule's replies carry no step length.
        """
        rule = ScaledVote() if aggregation is None else aggregation
        # Anything that is not a rule is refused where all rules are checked.
        if isinstance(rule, Aggregation) and not rule.n_reply_scales:
            raise InvalidArgumentError(
                f"aggregation={rule!r}: votes on deltas need a rule whose replies carry a step "
                "length. Choose one such as ScaledVote() or ResidualVote()"
            )
        return {
            # An outer momentum then moves x further.
            "lr": 1.0 if self.momentum else self.lr,
            "betas": (0.0, 0.0),
            "aggregation": rule,
        }

    @property
    def is_plain(self) -> bool:
        """True if x takes the result of a vote in full."""
        return self.lr == 1 and not self.momentum

    def describe(self) -> list[str]:
        """List the settings that must be equal on all workers and are in no param group."""
        return [
            "outer: 'sgd'",  # states of 0.1.0 hold this line
            f"outer_lr: {float(self.lr)!r}",
            f"outer_momentum: {float(self.momentum)!r}",
            f"nesterov: {self.nesterov!r}",
        ]


class OuterMomentum:
    """The momentum of the outcomes; equal on all workers, so it is never sent.

    Equation:
        u = x - x',  x' after a vote at rate 1
        b = mu * b + u
        x' = x - lr * (u + mu * b) with ``nesterov``, else x - lr * b
        (SGD of torch.optim with dampening 0; mu is ``momentum``)
        A parameter that nobody voted on keeps b and x.

    Args:
        step: The outer step; without momentum this class does nothing.
        params: The common point.

    Attributes:
        buffers: b for each parameter, float32; none without momentum.
    """

    def __init__(self, step: OuterStep, params: Sequence[Tensor]) -> None:
        self._step = step
        self.buffers: list[Tensor] = []
        self.cover(params)
        self._before: list[Tensor] = []

    def cover(self, params: Sequence[Tensor]) -> None:
        """Add zeros for parameters without momentum, which come after the others."""
        if self._step.momentum:
            self.buffers += [
                torch.zeros_like(param.detach()) for param in params[len(self.buffers) :]
            ]

    def begin(self, params: Sequence[Tensor]) -> None:
        """Remember the parameters' values before a vote moves some of them."""
        if self._step.momentum:
            self._before = [param.detach().clone() for param in params]

    def forget(self) -> None:
        """Drop the remembered values."""
        self._before = []

    @torch.no_grad()
    def finish(self, params: Sequence[Tensor], voted: Container[int]) -> None:
        """Move parameters to their final place after a vote at rate 1.

        Args:
            params: The common point, moved by the vote.
            voted: The places in ``params`` of those that some worker voted on.
        """
        step = self._step
        by_device: dict[torch.device, list[tuple[Tensor, Tensor, Tensor]]] = {}
        rows = zip(params, self._before, self.buffers, strict=False)
        for place, (param, start, buffer) in enumerate(rows):
            if place not in voted:
                continue
            row = (local_tensor(param).detach(), local_tensor(start), local_tensor(buffer))
            by_device.setdefault(param.device, []).append(row)
        for device, moving in by_device.items():
            whole = [[each.contiguous() for each in row] for row in moving]
            moved, starts, buffers = map(list, zip(*whole, strict=True))
            choose_kernels(device).add_outer_momentum(
                moved, starts, buffers, momentum=step.momentum, nesterov=step.nesterov, lr=step.lr
            )
            for (param, _, buffer), (x, _, b) in zip(moving, whole, strict=True):
                if x is not param or b is not buffer:  # in memory of another order
                    param.copy_(x)
                    buffer.copy_(b)


class OuterStage(Stage):
    """Turn a step of the voter, whose gradients are deltas, into the outer step.

    A step is one of ``DistributedLion``: it is committed on all workers, or x does not change and
    all raise the same error. The outer momentum and ``on_commit`` are part of the commit.

    Args:
        outer: The outer step.
        lines: Further lines that must be equal on all workers.
        on_commit: Function called at the end of a commit.

    Attributes:
        outer: As given.
        momentum: The momentum of the outcomes.
    """

    takes_scales = True
    keeps_momenta = False

    def __init__(
        self,
        outer: OuterStep,
        lines: Sequence[str] = (),
        *,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.outer, self.momentum = outer, OuterMomentum(outer, [])
        self._lines, self._on_commit = [*outer.describe(), *lines], on_commit
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
        return [f"calls of step() so far: {self._calls}"]

    def lay_out(self, params: Sequence[VotingParam]) -> None:
        """Give new parameters an outer momentum."""
        self._moving = [param.param for param in params]
        self.momentum.cover(self._moving)

    def begin(self) -> None:
        """Remember the values of the parameters."""
        self.momentum.begin(self._moving)

    def end(self) -> None:
        """Drop the remembered values."""
        self.momentum.forget()
        self._voted_alone = ()

    def amend(self, inputs: StepInputs) -> StepInputs:
        """If this worker cannot vote, let its header tell the others."""
        if self._problem is None or inputs.header.status is not Status.OK:
            return inputs
        return inputs.refused(self._problem)

    def commit(self, buckets: Sequence[Bucket]) -> None:
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
        return step_alone(params, inputs, None, self._move_alone)

    def _move_alone(
        self, params: Sequence[VotingParam], segments: Sequence[Segment], _: Coin | None
    ) -> None:
        self._voted_alone = [n for n, each in enumerate(segments) if each.grad is not None]
        for param, segment in zip(params, segments, strict=True):
            if segment.grad is not None:
                segment.param.sub_(segment.grad * segment.coefficients.lr)
                param.write_back(segment.param)
