"""Options that are numbers, with a unit or without: one format for all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer

from distlion.errors import InvalidArgumentError
from distlion_lab.cli.failure import refusing
from distlion_lab.planning.quantity import (
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_whole,
)

_Read = TypeVar("_Read")


def whole_option(**declared: Any) -> Any:
    """Declare an option that is a whole number; see ``parse_whole``.

    typer would read ``1_0`` as 10.
    """
    return typer.Option(parser=_as_parser(parse_whole), metavar="INTEGER", **declared)


def number_option(**declared: Any) -> Any:
    """Declare an option that is a finite number; see ``parse_number``."""
    return typer.Option(parser=_as_parser(parse_number), metavar="NUMBER", **declared)


def _as_parser(parse: Callable[[str], _Read]) -> Callable[[Any], _Read]:
    def read(value: Any) -> _Read:
        try:
            # Defaults arrive as numbers.
            return parse(str(value))
        except InvalidArgumentError as error:
            raise typer.BadParameter(str(error)) from error

    return read


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
