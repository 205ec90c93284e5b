"""Settings for averages of momenta over workers: steps, parameters and precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.param import VotingParam

SYNC_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
ALL, AUTO = "all", "auto"
# "auto" looks once momenta have formed, then at intervals.
_FIRST_LOOK = 16
_LOOK_EVERY = 2048
# Steps without averaging up to a look. With beta2 = 0.99, a lasting difference between workers is
# back to 1 - 0.99^256 = 92 % by then, and the square of one that is noise to 1 - 0.99^512 = 99 %.
_REST = 256


@dataclass(frozen=True)
class MomentumSync:
    """Average momenta over workers at intervals, so that their votes agree more.

    Equation:
        after a step, for the elements whose turn it is:  m_i = (1 / N) sum_j m_j
        bfloat16, int8:  m_i = m_i + ((1 / N) sum_j Q(m_j) - Q(m_i)), Q rounds to ``dtype``
        (Lion Cub, arXiv:2411.16462: momentum synchronization of some layers, every k steps.)

    Args:
        every: k; every element is averaged once in k steps.
        schedule: "exponential" in place of ``every``: once within the steps 2^i to 2^(i+1) - 1,
            for i = 0, 1, 2, ..., so that intervals double.
        select: "all"; a name or pattern of parameters ("*.attn.*", as in ``fnmatch``) or several;
            ``callable(name, param) -> bool``, the same on all workers; or "auto": those whose
            momenta differ most between workers.
        dtype: Dtype of the momenta that are sent: torch.float32, torch.bfloat16 or torch.int8 (with
            a scale for every 256 elements). Means are returned in float32.
        stagger: Average 1 / k of the elements in each step, instead of all in every k-th step: the
            same traffic, spread evenly over steps.
        share: With "auto", the share of all elements to average, above 0 and up to 1.

    Raises:
        InvalidArgumentError: A value is out of range, or both or neither of ``every`` and
            ``schedule`` are given.
        UnsupportedTypeError: A value is of a wrong type.

    Notes:
        Except for rounding, the mean of the momenta, and so global Lion's direction, does not
        change: averaging only removes the workers' differences, up to the rounding error of Q. Sums
        are added in float32 in rank order. "auto" compares ||mean_i m_i||^2 with mean_i ||m_i||^2
        after 16 steps, then after 2,048, 4,096, ... It sends only 256 elements of each parameter.
        It averages nothing in the first 16 steps and in the last 256 before a look, as freshly
        averaged momenta would look alike. Such steps do not count for ``every`` and ``schedule``.
    """

    every: int | None = None
    schedule: Literal["exponential"] | None = None
    select: str | Sequence[str] | Callable[[str, Tensor], bool] = ALL
    dtype: torch.dtype = torch.float32
    stagger: bool = True
    share: float = 0.5

    def __post_init__(self) -> None:
        self._check_interval()
        if self.dtype not in SYNC_DTYPES:
            raise InvalidArgumentError(
                f"MomentumSync(dtype={self.dtype}): expected torch.float32, torch.bfloat16 or "
                "torch.int8"
            )
        if not isinstance(self.stagger, bool):
            raise UnsupportedTypeError(f"MomentumSync(stagger={self.stagger!r}): expected a bool")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise UnsupportedTypeError(f"MomentumSync(share={self.share!r}): expected a number")
        if not 0 < self.share <= 1:
            raise InvalidArgumentError(
                f"MomentumSync(share={self.share}): expected a number above 0 and up to 1"
            )
        if self.share != type(self).share and self.select != AUTO:
            raise InvalidArgumentError(
                f"MomentumSync(share={self.share}) belongs to select='auto'; select is "
                f"{self.select!r}"
            )
        if callable(self.select) or isinstance(self.select, str):
            return
        if not isinstance(self.select, Sequence) or not all(
            isinstance(pattern, str) for pattern in self.select
        ):
            raise UnsupportedTypeError(
                f"MomentumSync(select={self.select!r}): expected 'all', 'auto', patterns, or a "
                "callable"
            )
        if not self.select:
            raise InvalidArgumentError("MomentumSync(select=()) selects nothing")
        object.__setattr__(self, "select", tuple(self.select))

    def _check_interval(self) -> None:
        if (self.every is None) == (self.schedule is None):
            raise InvalidArgumentError(
                f"MomentumSync(every={self.every!r}, schedule={self.schedule!r}): expected one of "
                "the two, such as every=100 or schedule='exponential'"
            )
        if self.schedule not in (None, "exponential"):
            raise InvalidArgumentError(
                f"MomentumSync(schedule={self.schedule!r}): expected 'exponential'"
            )
        if self.every is None:
            return
        if not isinstance(self.every, int) or isinstance(self.every, bool):
            raise UnsupportedTypeError(f"MomentumSync(every={self.every!r}): expected an integer")
        if self.every < 1:
            raise InvalidArgumentError(f"MomentumSync(every={self.every}): expected 1 or more")

    def part(self, step: int, n_elements: int) -> tuple[int, int]:
        """Return the elements that are averaged after a step, as (start, stop).

        Args:
            step: Number of the step, counted from 0.
            n_elements: Number of selected elements, in the order of the parameters.
        """
        count = step + 1
        if self.select == AUTO:
            if _is_at_rest(count):
                return 0, 0
            count = _count_active(count)
        if self.every is None:  # within an interval as long as all earlier ones together
            interval = 1 << (count.bit_length() - 1)
            turn = count - interval
        else:
            interval, turn = self.every, (count - 1) % self.every
        if self.stagger:
            return n_elements * turn // interval, n_elements * (turn + 1) // interval
        return (0, n_elements) if turn == interval - 1 else (0, 0)

    def is_measured(self, step: int) -> bool:
        """Return whether "auto" looks at the momenta after a step."""
        done = step + 1
        return self.select == AUTO and (done == _FIRST_LOOK or done % _LOOK_EVERY == 0)

    def choose(self, params: Sequence[VotingParam]) -> list[bool]:
        """Return for each trainable parameter whether it is selected, before any measurement.

        Raises:
            InvalidArgumentError: No parameter is selected.
        """
        select = self.select
        if select in (ALL, AUTO):
            return [True] * len(params)
        if callable(select):
            chosen = [bool(select(param.name, param.param)) for param in params]
        else:
            patterns = (select,) if isinstance(select, str) else tuple(select)
            chosen = [
                any(fnmatchcase(param.name, pattern) for pattern in patterns) for param in params
            ]
        if not any(chosen):
            known = ", ".join(param.name for param in params[:5])
            known += ", ..." if len(params) > 5 else ""
            raise InvalidArgumentError(
                f"MomentumSync(select={select!r}) selects none of the parameters {known}; give "
                "(name, parameter) pairs to the optimizer, such as model.named_parameters(), to "
                "select by name"
            )
        return chosen

    def describe_choice(self, params: Sequence[VotingParam]) -> str:
        """Describe the selection, as a function may choose differently on other workers."""
        chosen = self.choose(params)
        kept = [param.name for index, param in enumerate(params) if chosen[index]]
        return f"momenta averaged: {', '.join(kept)}"

    def describe(self) -> str:
        """Describe it equally on all workers, without addresses of functions."""
        select = self.select
        if callable(select):
            select = getattr(select, "__qualname__", type(select).__qualname__)
        return (
            f"MomentumSync(every={self.every!r}, schedule={self.schedule!r}, select={select!r}, "
            f"dtype={self.dtype}, stagger={self.stagger}, share={self.share!r})"
        )


def _is_at_rest(done: int) -> bool:
    """Return whether "auto" averages nothing in a step, counted from 1."""
    return done <= _FIRST_LOOK or -done % _LOOK_EVERY < _REST


def _count_active(done: int) -> int:
    """Count the steps not at rest up to and including this one."""
    blocks, within = divmod(done, _LOOK_EVERY)
    return (_LOOK_EVERY - _REST) * blocks + within - _FIRST_LOOK


def choose_least_coherent(
    coherences: Sequence[float], sizes: Sequence[int], share: float
) -> list[bool]:
    """Choose the parameters whose momenta differ most, until they make up a share.

    Args:
        coherences: ||mean_i m_i||^2 / mean_i ||m_i||^2 of each, 1 where workers agree.
        sizes: Number of elements of each.
        share: Share of all elements; the last parameter may exceed it.
    """
    order = sorted(range(len(sizes)), key=lambda index: coherences[index])
    chosen, missing = [False] * len(sizes), share * sum(sizes)
    for index in order:
        if missing <= 0:
            break
        chosen[index] = True
        missing -= sizes[index]
    return chosen
