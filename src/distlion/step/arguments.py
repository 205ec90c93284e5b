"""Checks of single arguments, and the records that former arguments have moved to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.contract import FLOAT32_MAX
from distlion.numpy_numbers import as_python

P = ParamSpec("P")
T = TypeVar("T")

FORMER = {
    "busy_timeout_s": "timeouts=Timeouts(busy_s=...)",
    "check_every": "replicas=Replicas(check_every=...)",
    "diagnose_every": "agreement=Agreement(every=...)",
    "exp_avg_dtype": "precision=Precision(exp_avg=...)",
    "init_timeout_s": "timeouts=Timeouts(init_s=...)",
    "on_disagreement": "agreement=Agreement(every=..., on_disagreement=...)",
    "on_mismatch": "replicas=Replicas(on_mismatch=...)",
    "rounding": "precision=Precision(rounding=...)",
    "step_timeout_s": "timeouts=Timeouts(step_s=...)",
}
"""Former arguments of optimizers, each with its successor."""

CUT = {
    "delay": "LocalSteps takes each result at once. Leave it out, or vote less often by every=",
    "outer": "the outer step is always SGD. Leave it out, and set outer_lr=, outer_momentum= and "
    "nesterov=",
    "outer_betas": "there is no outer Lion. Leave it out, and set outer_lr= and outer_momentum=",
    "parts": "all parameters vote together. Leave it out, or vote less often by every=",
}
"""Former arguments without a successor."""


def refusing_former(make: Callable[P, T]) -> Callable[P, T]:
    """Let a function refuse former arguments with UnsupportedTypeError, by their successors."""

    @wraps(make)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        for name in FORMER.keys() & options.keys():
            raise UnsupportedTypeError(
                f"{name}={options[name]!r}: a record has taken over this argument. Expected "
                f"{FORMER[name]}. Import the record from distlion"
            )
        for name in CUT.keys() & options.keys():
            raise UnsupportedTypeError(f"{name}={options[name]!r}: {CUT[name]}")
        return make(*args, **options)

    return checked


def check_number(name: str, value: Any) -> float:
    """Return ``value`` as a float: a number, also one of numpy, or a tensor with one element.

    Raises:
        UnsupportedTypeError: It is something else.
        InvalidArgumentError: It is not finite, or not as a float32.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    value = as_python(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedTypeError(f"{name}={value!r}: expected a number")
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:  # integers may be too large for a float
        shown = value if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
        raise InvalidArgumentError(
            f"{name}={shown}: expected a finite number, of at most {FLOAT32_MAX:.4g}"
        )
    return float(value)


def check_positive(name: str, value: float) -> None:
    """Raise InvalidArgumentError unless ``value`` is above 0; other errors as ``check_number``."""
    if not check_number(name, value) > 0:
        raise InvalidArgumentError(f"{name}={value}: expected a number above 0")


LONGEST_S = 1e9
"""Longest wait, about 30 years: the clocks of operating systems overflow at some longer ones."""


def check_seconds(name: str, value: float) -> None:
    """Raise InvalidArgumentError unless ``value`` is a wait's limit; else as ``check_number``."""
    check_positive(name, value)
    if value > LONGEST_S:
        raise InvalidArgumentError(f"{name}={value}: expected at most {LONGEST_S:,.0f} seconds")


def check_count(name: str, value: object, *, or_none: bool = False) -> None:
    """Check a number of steps, ranks or elements.

    Raises:
        UnsupportedTypeError: It is not an integer.
        InvalidArgumentError: It is below 1.
    """
    if value is None and or_none:
        return
    or_what = ", or None" if or_none else ""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedTypeError(f"{name}={value!r}: expected an integer{or_what}")
    if value < 1:
        raise InvalidArgumentError(f"{name}={value}: expected 1 or more{or_what}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InvalidArgumentError(
            f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}"
        )


def check_record(name: str, value: object, kind: type, *, or_none: bool = False) -> None:
    """Raise UnsupportedTypeError unless ``value`` is a record of this kind."""
    if not isinstance(value, kind) and not (value is None and or_none):
        or_what = ", or None" if or_none else ""
        raise UnsupportedTypeError(f"{name}={value!r}: expected {kind.__name__}(...){or_what}")
