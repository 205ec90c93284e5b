"""The outer step, which applies the outcome of a vote on deltas on all workers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.hyperparameters import check_number
from distlion.step.settings import check_choice
from distlion.votes.aggregation import Aggregation
from distlion.votes.majority import MajorityVote
from distlion.votes.scaled import ScaledVote

_LION_BETAS = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The move of the common point x by a vote on deltas.

    Equation:
        "sgd"   x' = x - lr * (b + ...), see ``OuterMomentum``; u = s * S, the outcome
        "lion"  x' = x - lr * S, a step of ``DistributedLion`` with the deltas for gradients

    Attributes:
        kind: "sgd" or "lion".
        lr: Outer learning rate.
        momentum: Weight of the outer momentum's old value, in [0, 1); for "sgd".
        nesterov: Whether the momentum looks ahead; for "sgd".
        betas: Betas of "lion".

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
            InvalidArgumentError: "lion" has no rate, "sgd" has betas, or as for the class.
            UnsupportedTypeError: As for the class.
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
        """Rate at which a vote moves x; an outer momentum then moves it further."""
        return 1.0 if self.momentum else self.lr

    @property
    def vote_betas(self) -> tuple[float, float]:
        """Betas of the votes; only "lion" has a momentum of deltas before the vote."""
        return self.betas if self.kind == "lion" else (0.0, 0.0)

    def choose_rule(self, given: Aggregation | None) -> Aggregation:
        """Return the rule for deltas, the given one or the default.

        Raises:
            InvalidArgumentError: The given rule's replies do not carry what this step needs.
        """
        if given is None:
            return MajorityVote() if self.kind == "lion" else ScaledVote()
        if isinstance(given, Aggregation) and bool(given.n_reply_scales) != (self.kind == "sgd"):
            needs, such = (
                ("carry a step length", "ScaledVote() or ResidualVote()")
                if self.kind == "sgd"
                else ("are signs alone", "MajorityVote() or FeedbackVote()")
            )
            raise InvalidArgumentError(
                f"aggregation={given!r}: outer={self.kind!r} needs a rule whose replies {needs}. "
                f"Choose one such as {such}"
            )
        return given  # anything that is not a rule is refused where all rules are checked

    def describe(self) -> list[str]:
        """List the settings that must be equal on all workers and are in no param group."""
        return [
            f"outer: {self.kind!r}",
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
        self._before: list[Tensor | None] = []

    def cover(self, params: Sequence[Tensor]) -> None:
        """Add zeros for parameters without momentum, which come after the others."""
        if self._step.momentum:
            self.buffers += [
                torch.zeros_like(param.detach()) for param in params[len(self.buffers) :]
            ]

    def begin(self, params: Sequence[Tensor], are_voting: Sequence[bool]) -> None:
        """Remember the parameters' values before a vote moves some of them."""
        if self._step.momentum:
            self._before = [
                param.detach().clone() if is_voting else None
                for param, is_voting in zip(params, are_voting, strict=True)
            ]

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
        # Separate products and sums: fused ones would round differently on another device.
        rows = zip(params, self._before, self.buffers, strict=False)
        for place, (param, start, buffer) in enumerate(rows):
            if start is None or place not in voted:
                continue
            outcome = start - param
            buffer.mul_(step.momentum).add_(outcome)
            move = buffer * step.momentum + outcome if step.nesterov else buffer
            param.copy_(start - move * step.lr)
