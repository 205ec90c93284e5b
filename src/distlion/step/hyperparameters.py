"""The numbers of a step: checked, in the form for the ops, and as text."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.contract import Coefficients
from distlion.step.agreement import AGREEMENT_KEY, Agreement
from distlion.step.arguments import FORMER, check_number
from distlion.step.staging import read_together

OF_THE_WHOLE = frozenset(
    {
        "agreement",
        "bucket_elements",
        "clip_norm",
        "exchange",
        "momentum_sync",
        "nodes",
        "nonfinite",
        "overlap",
        "precision",
        "process_group",
        "replicas",
        "seed",
        "timeouts",
        "weight",
        *FORMER,
    }
)
"""Arguments of a whole optimizer, former ones too, which no param group may have."""

FOREIGN_SWITCHES = ("maximize", "differentiable", "amsgrad", "nesterov")
"""Switches of other optimizers that would change a step; no Lion here has them."""


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Check the hyperparameters of a param group, and that no foreign switch is on.

    Raises:
        InvalidArgumentError: A value is out of range, or a switch would be ignored.
        UnsupportedTypeError: A value is not a number.
    """
    for key in sorted(OF_THE_WHOLE & group.keys()):
        if key == AGREEMENT_KEY and not isinstance(group[key], Agreement):
            continue  # the running agreement of each worker, which the first group keeps
        raise InvalidArgumentError(
            f"{key}={group[key]!r} in a param group: it belongs to the whole optimizer. Give "
            f"{FORMER.get(key, 'it')} to the constructor"
        )
    for switch in FOREIGN_SWITCHES:
        if group.get(switch):
            remedy = "; negate the loss" if switch == "maximize" else ""
            raise InvalidArgumentError(
                f"{switch}={group[switch]!r} in a param group: Lion does not have it{remedy}"
            )
    absent = [key for key in ("lr", "betas", "weight_decay") if key not in group]
    if absent:
        raise InvalidArgumentError(
            f"a param group has no {absent[0]!r}; expected a value. Put it back"
        )
    lr = check_number("lr", group["lr"])
    if not lr >= 0:
        raise InvalidArgumentError(f"lr={lr}: expected a finite number, 0 or more")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r}: expected two numbers, (beta1, beta2)")
    for index, beta in enumerate(betas):
        if not 0 <= check_number(f"betas[{index}]", beta) < 1:
            raise InvalidArgumentError(f"betas={tuple(betas)}: expected both in [0, 1)")
    weight_decay = check_number("weight_decay", group["weight_decay"])
    if not weight_decay >= 0:
        raise InvalidArgumentError(
            f"weight_decay={weight_decay}: expected a finite number, 0 or more"
        )
    _check_switches(group)
    if lr * weight_decay >= 1:
        raise InvalidArgumentError(
            f"lr * weight_decay = {lr * weight_decay}: expected less than 1, or weights flip sign"
        )


def _check_switches(group: Mapping[str, Any]) -> None:
    """Check cautious and orthogonalize of a param group."""
    cautious = group.get("cautious", False)
    if not isinstance(cautious, bool):
        raise UnsupportedTypeError(f"cautious={cautious!r}: expected True or False")
    orthogonalize = group.get("orthogonalize", False)
    if not isinstance(orthogonalize, bool):
        raise UnsupportedTypeError(f"orthogonalize={orthogonalize!r}: expected True or False")
    if orthogonalize and cautious:
        raise InvalidArgumentError(
            "orthogonalize=True and cautious=True in a param group: the mask makes votes on "
            "orthogonalized matrices worse. Expected one of them. Set cautious=False for the "
            "matrices, and leave it on for other groups"
        )


class GroupNumbers(NamedTuple):
    """The numbers that a step computes with, on the host.

    Attributes:
        lines: The result of ``describe_hyperparameters``.
        coefficients: The coefficients of every group.
        found_inf: Whether a GradScaler has seen an overflow on this worker.
    """

    lines: Sequence[str]
    coefficients: Sequence[Coefficients]
    found_inf: bool


_SEEN = ("lr", "weight_decay", "cautious", "orthogonalize", "aggregation", *FOREIGN_SWITCHES)


class GroupReader:
    """Read the numbers of each step, and check groups only where a value has changed since."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._numbers = GroupNumbers((), (), found_inf=False)

    def read(self, optimizer: Optimizer) -> GroupNumbers:
        """Return the same as ``read_groups``."""
        seen: list[Any] = []
        has_tensor = False
        for group in optimizer.param_groups:
            betas: Any = group.get("betas")
            # Copied, as the caller may change a sequence in place.
            betas = tuple(betas) if isinstance(betas, Sequence) else (betas,)
            values = [*betas, *map(group.get, _SEEN)]
            for value in values:
                has_tensor |= isinstance(value, Tensor)
            seen += *group, *map(type, values), *values
        has_scaler = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
        if has_tensor or has_scaler or seen != self._seen:
            self._seen, self._numbers = [], read_groups(optimizer)
            if not (has_tensor or has_scaler):
                self._seen = seen
        return self._numbers


def read_groups(optimizer: Optimizer) -> GroupNumbers:
    """Read the numbers of a step; numbers on a device are read all at once.

    Schedulers write them into the param groups. A GradScaler writes ``grad_scale``, its factor of
    the loss, and ``found_inf``, above 0 after an overflow.

    Args:
        optimizer: The optimizer that is about to do the step.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: A hyperparameter has left its range.
    """
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    found = [
        value
        for group in groups
        for value in (group.get("lr"), group.get("weight_decay"), *_listed(group.get("betas")))
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")
        if value.numel() == 1
    ]
    found += [number for number in (grad_scale, found_inf) if number is not None]
    scale, has_overflow = 1.0, False
    if found:
        read = read_together([number.detach().double().view(1) for number in found])
        floats = {id(number): read[index] for index, number in enumerate(found)}
        groups = [_with_floats(group, floats) for group in groups]
        scale = 1.0 if grad_scale is None else 1.0 / floats[id(grad_scale)]
        has_overflow = found_inf is not None and floats[id(found_inf)] > 0
    coefficients = read_coefficients(groups, grad_scale=scale)
    return GroupNumbers(describe_hyperparameters(groups), coefficients, has_overflow)


def _listed(betas: Any) -> Sequence[Any]:
    """Return possible betas as a sequence; other values are refused elsewhere."""
    return betas if isinstance(betas, list | tuple) else ()


def _with_floats(group: Mapping[str, Any], floats: Mapping[int, float]) -> dict[str, Any]:
    """Return a group with its tensors replaced by numbers, which are given by tensor id."""
    resolved = {
        key: floats.get(id(group[key]), group[key])
        for key in ("lr", "weight_decay")
        if key in group
    }
    if betas := tuple(floats.get(id(beta), beta) for beta in _listed(group.get("betas"))):
        resolved["betas"] = betas
    return {**group, **resolved}


def read_coefficients(
    groups: Sequence[Mapping[str, Any]], *, grad_scale: float
) -> list[Coefficients]:
    """Read every group's hyperparameters, where schedulers write them.

    Args:
        groups: Param groups.
        grad_scale: Factor for raw gradients.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: One has left its range.
    """
    coefficients = []
    for group in groups:
        check_hyperparameters(group)
        beta1, beta2 = group["betas"]
        coefficients.append(
            Coefficients(
                float(beta1),
                float(beta2),
                float(group["lr"]),
                float(group["weight_decay"]),
                grad_scale,
                group.get("cautious", False),
                group.get("orthogonalize", False),
            )
        )
    return coefficients


def describe_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line for each value that may change from step to step, as the ops take it."""
    return [
        line
        for number, group in enumerate(groups)
        for line in (
            f"lr of group {number}: {_as_taken(group.get('lr'))!r}",
            f"betas of group {number}: {_as_taken(group.get('betas'))!r}",
            f"weight_decay of group {number}: {_as_taken(group.get('weight_decay'))!r}",
            f"cautious of group {number}: {group.get('cautious')!r}",
            f"orthogonalize of group {number}: {group.get('orthogonalize')!r}",
            f"aggregation of group {number}: {group.get('aggregation')!r}",
        )
    ]


def describe_steps(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line for the step of each group, which headers carry if it can be read."""
    return [
        f"step of group {number}: {_as_whole(group.get('step'))!r}"
        for number, group in enumerate(groups)
    ]


def _as_taken(value: Any) -> Any:
    """Return a number as a float, several as a tuple, and anything else unchanged."""
    try:
        return tuple(map(float, value)) if isinstance(value, Sequence) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a meta tensor
        return value


def _as_whole(value: Any) -> Any:
    """Return an integer of any type as Python's, and anything else unchanged."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return value


_LARGEST_STEP = 2**53  # what JSON and float64 hold exactly


def check_step(group: Mapping[str, Any], number: int | None = None) -> int:
    """Return the step that a param group is at.

    Raises:
        InvalidArgumentError: It is not an integer from 0 to 2^53.
    """
    step = group.get("step")
    index = None if isinstance(step, bool) else _as_whole(step)
    if not isinstance(index, int) or not 0 <= index <= _LARGEST_STEP:
        is_large = isinstance(index, int) and index > 0
        shown = "an integer above 2^53" if is_large else repr(step)
        where = "a param group" if number is None else f"group {number}"
        raise InvalidArgumentError(
            f"step of {where} is {shown}; expected an integer from 0 to 2^53. It counts "
            "committed steps: leave it to the optimizer"
        )
    return index


def read_step(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return the step that all param groups are at.

    Raises:
        InvalidArgumentError: One holds no valid step, or they are at different steps.
    """
    first: Any = groups[0].get("step") if groups else None
    if type(first) is int and 0 <= first <= _LARGEST_STEP:
        for group in groups:
            if group.get("step") is not first:  # of the same step, by ``_advance``
                break
        else:
            return int(first)
    steps = [check_step(group, number) for number, group in enumerate(groups)]
    if len(set(steps)) != 1:
        raise InvalidArgumentError(
            f"the param groups are at steps {steps}; expected the same in all. It counts committed "
            "steps: leave it to the optimizer"
        )
    return steps[0]
