"""The outer step: what all workers do with the outcome of a vote on deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distlion.aggregation import Aggregation, MajorityVote, ScaledVote
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.options import check_choice
from distlion.step import check_number

_LION_BETAS = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """How the common point x moves by a vote on deltas.

    Equation:
        "sgd"   x' = x - lr * (b + ...), see ``OuterMomentum``; u = s * S, what the vote says
        "lion"  x' = x - lr * S, a step of ``DistributedLion`` with the deltas for gradients

    Attributes:
        kind: "sgd" or "lion".
        lr: Outer rate.
        momentum: Weight of what was in the outer momentum, in [0, 1); of "sgd".
        nesterov: Whether the momentum looks ahead; of "sgd".
        betas: Of "lion".

    Raises:
        InvalidArgumentError: A number is out of range, or has no effect with this kind.
        UnsupportedTypeError: A value is of a wrong kind.
    """

    kind: Literal["sgd", "lion"]
    lr: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]

    def __post_init__(self) -> None:
        check_choice("outer", self.kind, ("sgd", "lion"))
        if not check_number("outer_lr", self.lr) > 0:
            raise InvalidArgumentError(f"outer_lr={self.lr}: expected a number above 0")
        if not 0 <= check_number("outer_momentum", self.momentum) < 1:
            raise InvalidArgumentError(f"outer_momentum={self.momentum}: expected it in [0, 1)")
        if not isinstance(self.nesterov, bool):
            raise UnsupportedTypeError(f"nesterov={self.nesterov!r}: expected True or False")
        if self.nesterov and not self.momentum:
            raise InvalidArgumentError(
                "nesterov=True looks ahead by a momentum, and outer_momentum is 0. Give one, such "
                "as 0.9, or leave nesterov out"
            )
        if self.kind == "lion" and self.momentum:
            raise InvalidArgumentError(
                f"outer_momentum={self.momentum} belongs to outer='sgd'; outer='lion' takes "
                "outer_betas"
            )

    @classmethod
    def choose(
        cls,
        *,
        kind: Literal["sgd", "lion"],
        lr: float | None,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float] | None,
    ) -> OuterStep:
        """Return an outer step; None stands for the default of its kind.

        Raises:
            InvalidArgumentError: "lion" has no rate, "sgd" has betas, or as the class says.
            UnsupportedTypeError: As the class says.
        """
        if kind == "lion" and lr is None:
            raise InvalidArgumentError(
                "outer='lion' moves every element by outer_lr, and none was given. Expected a "
                "number above 0. Give outer_lr, much smaller than the weights"
            )
        if kind == "sgd" and betas is not None:
            raise InvalidArgumentError(
                f"outer_betas={betas!r} belongs to outer='lion'; outer='sgd' takes outer_momentum"
            )
        return cls(
            kind=kind,
            lr=1.0 if lr is None else lr,
            momentum=momentum,
            nesterov=nesterov,
            betas=_LION_BETAS if betas is None else betas,
        )

    @property
    def vote_lr(self) -> float:
        """The rate at which a vote moves x; where there is a momentum, it goes on from there."""
        return 1.0 if self.momentum else self.lr

    @property
    def vote_betas(self) -> tuple[float, float]:
        """The betas of the votes: deltas have no momentum before the vote, but for "lion"."""
        return self.betas if self.kind == "lion" else (0.0, 0.0)

    def choose_rule(self, given: Aggregation | None) -> Aggregation:
        """Return how deltas are voted on, by default or as given.

        Raises:
            InvalidArgumentError: Replies of the given rule do not say what this step needs.
        """
        if given is None:
            return MajorityVote() if self.kind == "lion" else ScaledVote()
        if isinstance(given, Aggregation) and bool(given.n_reply_scales) != (self.kind == "sgd"):
            needs, such = (
                ("say how far elements move", "ScaledVote() or ResidualVote()")
                if self.kind == "sgd"
                else ("are signs alone", "MajorityVote() or FeedbackVote()")
            )
            raise InvalidArgumentError(
                f"aggregation={given!r}: outer={self.kind!r} needs a rule whose replies {needs}. "
                f"Choose one such as {such}"
            )
        return given  # what is no rule is refused where all rules are checked

    def describe(self) -> list[str]:
        """One line for each thing that must be equal on all workers and is in no param group."""
        return [
            f"outer: {self.kind!r}",
            f"outer_lr: {float(self.lr)!r}",
            f"outer_momentum: {float(self.momentum)!r}",
            f"nesterov: {self.nesterov!r}",
        ]


class OuterMomentum:
    """The momentum of the outcomes, which all workers know alike, so that it is never sent.

    Equation:
        u = x - x',  x' after a vote at rate 1
        b = mu * b + u
        x' = x - lr * (u + mu * b) with ``nesterov``, else x - lr * b
        (SGD of torch.optim with dampening 0; mu is ``momentum``)

    Args:
        step: What to do; without momentum this does nothing.
        params: The common point.

    Attributes:
        buffers: b for each parameter, float32; none without momentum.
    """

    def __init__(self, step: OuterStep, params: Sequence[Tensor]) -> None:
        self._step = step
        self.buffers: list[Tensor] = []
        self.cover(params)
        self._before: list[Tensor | None] = []

    def cover(self, params: Sequence[Tensor]) -> None:
        """Begin with zeros for parameters that have no momentum yet; the others come first."""
        if self._step.momentum:
            self.buffers += [
                torch.zeros_like(param.detach()) for param in params[len(self.buffers) :]
            ]

    def begin(self, params: Sequence[Tensor], are_voting: Sequence[bool]) -> None:
        """Remember where parameters are before a vote moves some of them."""
        if self._step.momentum:
            self._before = [
                param.detach().clone() if is_voting else None
                for param, is_voting in zip(params, are_voting, strict=True)
            ]

    def forget(self) -> None:
        """Let go of what was remembered."""
        self._before = []

    @torch.no_grad()
    def finish(self, params: Sequence[Tensor]) -> None:
        """Move parameters on from where a vote at rate 1 has left them."""
        step = self._step
        # Products and sums apart: fused, they would round otherwise on another device.
        for param, start, buffer in zip(params, self._before, self.buffers, strict=False):
            if start is None:
                continue
            outcome = start - param
            buffer.mul_(step.momentum).add_(outcome)
            move = buffer * step.momentum + outcome if step.nesterov else buffer
            param.copy_(start - move * step.lr)
