"""JSON files from unknown sources: read within limits, and checked against a shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlion_lab.errors import DataError
from distlion_lab.plain_file import read_plain_file

_MOST_BYTES = 1 << 28
_MOST_DEPTH = 64
# The range of float32, which covers all numbers of networks and links.
_LARGEST_NUMBER = 3.5e38

Shape = Callable[[Any, str], None]
"""A check of a value at a place; it raises DataError if the value has another shape."""


def read_json(path: Path) -> Any:
    """Read a JSON file: numbers, strings, lists and objects, nested at most 64 deep.

    Raises:
        DataError: The file cannot be read, is no JSON, or exceeds a limit; the message has the
            reason, but no path.
    """
    data = read_plain_file(path, limit_bytes=_MOST_BYTES)
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise DataError("it is nested too deeply") from error
    except ValueError as error:
        raise DataError(str(error)) from error
    _check_limits(value)
    return value


def _check_limits(root: Any) -> None:
    """Check for content that breaks printing or writing: depth, and halves of characters."""
    level = [root]
    for _ in range(_MOST_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and not value.isascii():
                _check_text(value)
        if not below:
            return
        level = below
    raise DataError("it is nested too deeply")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("it holds half of a character") from error


def number(value: Any, place: str) -> None:
    """Accept a finite number of float32's range."""
    if type(value) not in (int, float) or not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        _refuse(value, place, "a number")


def whole(value: Any, place: str) -> None:
    """Accept a whole number of 64 bits, 0 or above."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        _refuse(value, place, "a whole number")


def text(value: Any, place: str) -> None:
    """Accept a string."""
    if type(value) is not str:
        _refuse(value, place, "a string")


def optional(shape: Shape) -> Shape:
    """Accept null, and all values of a shape."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            shape(value, place)

    return check


def row(shape: Shape, *, least: int = 0) -> Shape:
    """Accept a list of at least some values of a shape."""

    def check(value: Any, place: str) -> None:
        if type(value) is not list or len(value) < least:
            _refuse(value, place, f"a list of {least} or more")
        for index, item in enumerate(value):
            shape(item, f"{place}[{index}]")

    return check


def fields(**shapes: Shape) -> Shape:
    """Accept an object that has these fields, among others."""

    def check(value: Any, place: str) -> None:
        if type(value) is not dict:
            _refuse(value, place, "an object")
        for name, shape in shapes.items():
            if name not in value:
                raise DataError(f"{place} lacks {name!r}")
            shape(value[name], f"{place}.{name}")

    return check


def columns(**shapes: Shape) -> Shape:
    """Accept an object of lists with equal lengths."""
    accept = fields(**{name: row(shape) for name, shape in shapes.items()})

    def check(value: Any, place: str) -> None:
        accept(value, place)
        lengths = {name: len(value[name]) for name in shapes}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{place} has columns of unequal lengths: {lengths}")

    return check


def _refuse(value: Any, place: str, expected: str) -> None:
    raise DataError(f"{place} is {str(value)[:80]!r}; expected {expected}")
