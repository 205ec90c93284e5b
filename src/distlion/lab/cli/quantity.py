"""Options with a number and a unit: one format for all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from distlion.lab.cli.failure import refusing
from distlion.lab.planning import parse_count, parse_rate, parse_seconds

_Read = TypeVar("_Read")


def read_count(option: str, text: str) -> int:
    """Read a count such as ``125M``; see ``parse_count``.

    Raises:
        InvalidArgumentError: It is none; names the option.
    """
    return _read(option, text, parse_count)


def read_rate(option: str, text: str) -> float:
    """Read a rate such as ``1Gbps``, in bit/s; see ``parse_rate``.

    Raises:
        InvalidArgumentError: It is none; names the option.
    """
    return _read(option, text, parse_rate)


def read_seconds(option: str, text: str, *, unit: str = "s") -> float:
    """Read a time such as ``500ms``, in seconds; without a unit it is in ``unit``.

    Raises:
        InvalidArgumentError: It is none; names the option.
    """
    return _read(option, text, lambda given: parse_seconds(given, unit=unit))


def _read(option: str, text: str, parse: Callable[[str], _Read]) -> _Read:
    with refusing(option):
        return parse(text)
