"""A worker's own parameters, each with its common point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from distlion.errors import UnsupportedTypeError
from distlion.local.arguments import check_common_device
from distlion.local.inner_state import find_broken
from distlion.optim.arguments import check_params, label_params, list_group, resolve_names
from distlion.step.param import is_dtensor


class LocalPairs:
    """Pair the parameters that votes move with the common point.

    Args:
        device: Device of the common point; None for each parameter's own.

    Attributes:
        pairs: (own parameter, common point), in order.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def own(self) -> list[Tensor]:
        """The worker's own parameters."""
        return [param for param, _ in self.pairs]

    @property
    def common(self) -> list[Tensor]:
        """The common point of each."""
        return [common.detach() for _, common in self.pairs]

    def place(
        self, names: Sequence[str], params: Sequence[Tensor], *, known: Mapping[Tensor, str]
    ) -> list[tuple[str, Tensor]]:
        """Make the common point of parameters; a frozen parameter is its own.

        Raises:
            InvalidArgumentError, UnsupportedTypeError: One of them cannot be voted on.
        """
        check_params(params, names, known=known)
        placed = []
        for name, param in zip(names, params, strict=True):
            common = param
            if param.requires_grad:
                common = nn.Parameter(copy_to_common(param, self._device))
                self.pairs.append((param, common))
            placed.append((name, common))
        return placed

    def add_group(self, inner: Optimizer, param_group: dict[str, Any]) -> list[tuple[str, Tensor]]:
        """Add a group to the inner optimizer, and make its common point, as ``place`` does."""
        group, known = list_group(param_group), label_params(inner.param_groups)
        has_names = any("param_names" in each for each in inner.param_groups)
        labels, added = resolve_names(dict(group), len(inner.param_groups), has_names=has_names)
        placed = self.place(labels, added, known=known)
        inner.add_param_group(group)
        return placed


@contextmanager
def undoing_groups(inner: Optimizer) -> Iterator[None]:
    """Undo a block's additions to an optimizer's groups and state if the block raises."""
    n_groups, known = len(inner.param_groups), set(inner.state)
    try:
        yield
    except BaseException:
        del inner.param_groups[n_groups:]
        for param in inner.state.keys() - known:
            del inner.state[param]
        raise


Pairs = Sequence[tuple[Tensor, Tensor]]
"""A worker's own parameters, each with its common point."""


def set_deltas(pairs: Pairs, inner: Optimizer) -> list[Tensor]:
    """Set the worker's deltas as gradients of the common point.

    A delta counts as not finite, too, where the inner state is not: no later step would move the
    parameter as it should.

    Returns:
        The parameters whose inner state is not finite.
    """
    broken = find_broken(inner, [param for param, _ in pairs])
    lost = set(broken)
    for param, common in pairs:
        common.grad = find_delta(param, common)
        if param in lost:
            common.grad.fill_(torch.nan)
    return broken


def forget_deltas(pairs: Pairs) -> None:
    """Drop these gradients."""
    for _, common in pairs:
        common.grad = None


@torch.no_grad()
def take_common(pairs: Pairs) -> None:
    """Move the worker to the common point."""
    for param, common in pairs:
        param.copy_(common)


@torch.no_grad()
def give_common(pairs: Pairs) -> None:
    """Move the common point to the worker's parameters, except where they are not finite."""
    for param, common in pairs:
        # A parameter that is not finite abstains.
        target, source = (common, param) if param.isfinite().all() else (param, common)
        target.copy_(source)


@torch.no_grad()
def copy_to_common(param: Tensor, device: torch.device | None) -> Tensor:
    """Copy a parameter into a contiguous float32 tensor, perhaps on another device.

    Raises:
        UnsupportedTypeError: It is a DTensor, whose mesh sets its device.
        InvalidArgumentError: This machine has no such device.
    """
    if is_dtensor(param):
        if device is not None and device.type != param.device.type:
            raise UnsupportedTypeError(
                f"common_device={str(device)!r}: the parameters are DTensors on "
                f"{param.device.type}, and the common point has their mesh. Leave it out"
            )
        return param.detach().to(torch.float32, copy=True)
    if device is not None:
        check_common_device(device)
    common = torch.empty(param.shape, dtype=torch.float32, device=device or param.device)
    return common.copy_(param)


@torch.no_grad()
def find_delta(param: Tensor, common: Tensor) -> Tensor:
    """Return a parameter's distance from where its period began, float32 as the common point."""
    begun = common.to(param.dtype).to(torch.float32)
    return begun - param.detach().to(common.device, torch.float32)
