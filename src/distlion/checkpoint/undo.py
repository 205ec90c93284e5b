"""Undo of a load's changes, if it ends with an error."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import Logger
from threading import Thread
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

_LEFT_ALONE = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(Optimizer, Dataset, Iterator, Thread, Logger),
)
"""Types without a copy: code, data sets, live objects; optimizers restore their own state."""


@contextmanager
def all_or_nothing(*kept: Any) -> Iterator[None]:
    """Restore objects if the block raises.

    Args:
        kept: Objects that may change: tensors, modules, schedulers, samplers, containers of them,
            and objects of any other class, with all that can be reached from them. The process's
            random number generators are restored too.

    Notes:
        Every object is restored in place, from a copy of its attributes, elements or values. A
        ``state_dict`` is no such copy: a LambdaLR's has None in the place of functions.
    """
    before = _Copies(kept)
    try:
        yield
    except BaseException:
        before.restore()
        raise


class _Copies:
    """Copies of objects and of all that can be reached from them.

    Args:
        kept: The objects.
    """

    def __init__(self, kept: tuple[Any, ...]) -> None:
        # Holds the objects themselves, so that no other object can get one's id.
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = [*_keep_random_numbers()]
        # Lists instead of recursion: chains may be long.
        pending = list(kept)
        while pending:
            value = pending.pop()
            if id(value) in self._seen or isinstance(value, _LEFT_ALONE):
                continue
            self._seen[id(value)] = value
            if isinstance(value, DataLoader):
                self._seen[id(value.dataset)] = value.dataset
            pending += self._copy(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for put_back in self._undo:
            put_back()

    def _copy(self, value: Any) -> list[Any]:
        """Copy one object; return the objects that it refers to."""
        if isinstance(value, Tensor):
            self._undo.append(partial(_write, value, value.detach().clone()))
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(_rewind, value, value.get_state()))
        elif isinstance(value, nn.Module):
            return [each for module in value.modules() for each in _list_parts(module)]
        elif isinstance(value, dict):
            self._undo.append(partial(_refill, value, value.update, dict(value)))
            return list(value.values())
        elif isinstance(value, set):
            self._undo.append(partial(_refill, value, value.update, set(value)))
        elif isinstance(value, list | deque):
            self._undo.append(partial(_refill, value, value.extend, list(value)))
            return list(value)
        elif isinstance(value, tuple):
            return list(value)
        elif hasattr(value, "__dict__"):
            return [vars(value)]
        return []


def _list_parts(module: nn.Module) -> list[Any]:
    """List the parts of a module that a load of its state changes, without its submodules."""
    has_more = type(module).set_extra_state is not nn.Module.set_extra_state
    return [module._parameters, module._buffers, *([vars(module)] if has_more else [])]


def _write(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(tensor, values):  # or autograd would refuse a gradient under way
        tensor.copy_(values)


def _rewind(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _refill(container: Any, add: Callable[[Any], None], elements: Any) -> None:
    container.clear()
    add(elements)


def _keep_random_numbers() -> Iterator[Callable[[], None]]:
    yield partial(random.setstate, random.getstate())
    yield partial(np.random.set_state, np.random.get_state())  # noqa: NPY002, as programs use it
    yield partial(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
