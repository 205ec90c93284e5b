"""An optimizer around another one, with which it shares param groups and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

from torch.optim.optimizer import Optimizer

from distlion.errors import UnsupportedTypeError
from distlion.local.inner_optimizers import InnerOptimizers
from distlion.optim.base import VotingBase

Inner = Optimizer | Sequence[Optimizer]
"""An inner optimizer, or several that share no parameter."""


class AroundInner(Optimizer):
    """Share ``param_groups`` and ``state`` with an inner optimizer, which may replace them.

    Args:
        inner: Optimizer that takes steps without other workers, or several.

    Raises:
        UnsupportedTypeError: It is not an optimizer, or its steps communicate.
        InvalidArgumentError: Two of several share a parameter.
    """

    _is_set_up = False

    def __init__(self, inner: Inner) -> None:
        self._inner = check_inner(inner)
        # torch sets up the hooks and defaults of this one; groups and state stay the inner's.
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._is_set_up = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_set_up:
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_set_up:
            self._inner.state = state

    @property
    def inner(self) -> Optimizer:
        """The optimizer that takes the local steps; several are one, with ``optimizers``."""
        return self._inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the inner optimizer."""
        self._inner.zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies, as ``DistributedLion`` does.

        Raises:
            UnsupportedTypeError: Always.
        """
        raise UnsupportedTypeError(
            f"{type(self).__name__} cannot be copied or pickled: its connections and votes belong "
            "to this process. Save state_dict(), or every worker's state by "
            "distlion.save_checkpoint, and load it into a new optimizer"
        )


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


def check_inner(inner: object) -> Optimizer:
    """Return the optimizer that takes the local steps, made of all if there are several.

    Raises:
        UnsupportedTypeError: It is not an optimizer, or its workers communicate in each step.
        InvalidArgumentError: A list is empty, or two of its optimizers share a parameter.
    """
    if isinstance(inner, list | tuple):
        return InnerOptimizers([_check_alone(each) for each in inner])
    return _check_alone(inner)


def _check_alone(inner: object) -> Optimizer:
    if isinstance(inner, VotingBase | AroundInner) or not isinstance(inner, Optimizer):
        raise UnsupportedTypeError(
            f"inner is a {type(inner).__name__}; expected an optimizer of torch.optim, or Lion, "
            "that takes steps without other workers, or a list of such"
        )
    return inner
