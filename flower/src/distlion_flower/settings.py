"""Settings of the server of clients' votes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels import FLOAT32_MAX
from distlion.numpy_numbers import keep_as_python
from distlion.step import check_choice, check_number
from distlion_flower.ballot import RULES


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server that counts clients' votes.

    Equation:
        v <- momentum * v + u,  x <- x - lr * v,  u by the rule, from the ballots taken
        "stochastic"  u = b * sum_i w_i s_i / sum_i w_i, with one b for all clients: spread times
                      the median of the clients' mean |d| in the last round, or, in the first
                      round, in that round itself
        "majority"    u = a * sign(sum_i w_i s_i), a the median of the clients' mean |d|
        "residual"    u = sum_i w_i a_i s_i / sum_i w_i, a_i the client's own scale, at most
                      max_weight times the median one

    Attributes:
        rule: One of the rules above.
        lr: Server rate, above 0; or a function of the round's number, from 0, that returns it. It
            may return 0, as schedules do at their ends.
        momentum: Momentum of the server, in [0, 1).
        spread: Spread of "stochastic", above 0. Larger values are noisier, smaller ones biased.
        weights: "examples" weights a client by its number of examples, up to ``max_weight`` times
            the median one; "equal" weights all alike.
        max_weight: Largest weight in units of the median, 1 or more.
        min_replies: Smallest number of ballots taken; with fewer, a round is void.
        max_scale: Largest scale of a ballot that is taken.
        seed: Seed of ties.

    Raises:
        InvalidArgumentError: A number is out of range.
        UnsupportedTypeError: A value has a wrong type.
    """

    rule: Literal["stochastic", "majority", "residual"] = "stochastic"
    lr: float | Callable[[int], float] = 1.0
    momentum: float = 0.9
    spread: float = 3.0
    weights: Literal["examples", "equal"] = "examples"
    max_weight: float = 10.0
    min_replies: int = 1
    max_scale: float = 1e3
    seed: int = 0

    def __post_init__(self) -> None:
        keep_as_python(self, "min_replies", "seed")
        check_choice("rule", self.rule, RULES)
        check_choice("weights", self.weights, ("examples", "equal"))
        if not callable(self.lr):
            self.lr_of(0)
        if not 0 <= check_number("momentum", self.momentum) < 1:
            raise InvalidArgumentError(f"momentum={self.momentum}: expected it in [0, 1)")
        if not check_number("spread", self.spread) > 0:
            raise InvalidArgumentError(f"spread={self.spread}: expected a number above 0")
        if not check_number("max_weight", self.max_weight) >= 1:
            raise InvalidArgumentError(f"max_weight={self.max_weight}: expected 1 or more")
        largest = FLOAT32_MAX / max(1.0, self.spread, self.max_weight)
        if not 0 < check_number("max_scale", self.max_scale) <= largest:
            raise InvalidArgumentError(
                f"max_scale={self.max_scale}: expected a number above 0 that is finite as a "
                "float32, also times spread and times max_weight"
            )
        for name in ("min_replies", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UnsupportedTypeError(f"{name}={value!r}: expected an integer")
        if self.min_replies < 1:
            raise InvalidArgumentError(f"min_replies={self.min_replies}: expected 1 or more")

    def lr_of(self, round_number: int) -> float:
        """Return the server rate of a round.

        Raises:
            InvalidArgumentError: The rate is not above 0, or a function returned one below 0.
            UnsupportedTypeError: The rate is not a number.
        """
        given = self.lr(round_number) if callable(self.lr) else self.lr
        rate = check_number("lr", given)
        if rate < 0 or (rate == 0 and not callable(self.lr)):
            least = "of 0 or more" if callable(self.lr) else "above 0"
            raise InvalidArgumentError(
                f"lr={given} in round {round_number}: expected a number {least}"
            )
        return rate
