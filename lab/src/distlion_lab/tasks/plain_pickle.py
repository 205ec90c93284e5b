"""Read a pickle as plain data: a small interpreter that looks up no name and calls nothing.

Names, calls and states of a pickle become inert records. Only ``build_bytes_array`` knows one use
of them, the pickle of a uint8 array, and builds the array from its bytes after a check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from distlion_lab.errors import DataError

# A batch of 10,000 images takes at most 120,000 opcodes; each makes at most one small object.
_MOST_OPCODES = 1 << 21
_MOST_DIGITS = 20
_MOST_DIMS = 8


@dataclass(frozen=True)
class Name:
    """A name in a pickle, which is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Call:
    """A call in a pickle, which is never made.

    Attributes:
        function: Name of the function.
        args: Arguments of the call.
        state: State to set on the result.
    """

    function: Name
    args: tuple[Any, ...]
    state: Any = None


_NDARRAY, _DTYPE = Name("numpy", "ndarray"), Name("numpy", "dtype")
_ENCODE = Name("_codecs", "encode")
# numpy renamed its core in 2.0.
_REBUILD = {Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_FROM_BUFFER = {Name(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
_KNOWN = {_NDARRAY, _DTYPE, _ENCODE, *_REBUILD, *_FROM_BUFFER}


def read_plain_pickle(data: bytes) -> Any:
    """Read a pickle of numbers, strings, bytes, lists, tuples and dicts.

    Strings of Python 2 become bytes. All protocols can be read but Python 2's text protocol 0.

    Args:
        data: The whole pickle.

    Returns:
        The content; a ``Call`` stands in place of an array.

    Raises:
        DataError: The pickle is damaged, larger than any batch, or holds something else.
    """
    return _Machine(_Source(data)).run()


def build_bytes_array(value: Any) -> npt.NDArray[np.uint8] | None:
    """Build the uint8 array that a ``Call`` describes; None for anything else."""
    if not isinstance(value, Call):
        return None
    order: Any
    match value:
        case Call(name, (kind, _, _), (1, shape, dtype, order, data)) if name in _REBUILD:
            if kind != _NDARRAY or not isinstance(order, bool | int):
                return None
            order = "F" if order else "C"
        case Call(name, (data, dtype, shape, order), None) if name in _FROM_BUFFER:
            if order not in ("C", "F"):
                return None
        case _:
            return None
    if not _is_uint8(dtype) or not _fits(shape, data):
        return None
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order=order)


def _is_uint8(dtype: Any) -> bool:
    match dtype:
        case Call(name, ("u1" | b"u1", _, _), (3, "|" | b"|", None, None, None, -1, -1, 0)):
            return name == _DTYPE
    return False


def _fits(shape: Any, data: Any) -> bool:
    """Return True if there is exactly one byte for each element."""
    return (
        isinstance(data, bytes)
        and isinstance(shape, tuple)
        and len(shape) <= _MOST_DIMS
        and all(type(size) is int and 0 <= size <= len(data) for size in shape)
        and math.prod(shape) == len(data)
    )


def _refuse(why: str) -> NoReturn:
    raise DataError(why)


class _Source:
    """The bytes of a pickle, taken from front to back."""

    def __init__(self, data: bytes) -> None:
        self.n_bytes = len(data)
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > self.n_bytes:
            _refuse("its pickle ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def unsigned(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def signed(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little", signed=True)

    def counted(self, n_bytes: int) -> bytes:
        """Take a block with its length in the first ``n_bytes``."""
        return self.take(self.unsigned(n_bytes))

    def text(self, n_bytes: int) -> str:
        return _decode(self.counted(n_bytes), "utf-8")

    def line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            _refuse("its pickle ends too early")
        taken = self._data[self._at : end]
        self._at = end + 1
        return taken

    def number(self) -> Any:
        """Take a line with a number; protocols 0 and 1 write False and True as 00 and 01."""
        digits = self.line().removesuffix(b"L")
        if digits in (b"00", b"01"):
            return digits == b"01"
        if len(digits) > _MOST_DIGITS or not digits.removeprefix(b"-").isdigit():
            _refuse("its pickle holds a malformed number")
        return int(digits)


def _decode(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        _refuse(f"its pickle holds a string that is not {encoding}")


def _known(name: Name) -> Name:
    return name if name in _KNOWN else _refuse(f"its pickle asks for {str(name)[:100]!r}")


# Opcodes that push one value, as pickletools describes them.
_VALUES: Final[dict[bytes, Callable[[_Source], Any]]] = {
    b"N": lambda source: None,
    b"\x88": lambda source: True,
    b"\x89": lambda source: False,
    b"}": lambda source: {},
    b"]": lambda source: [],
    b")": lambda source: (),
    b"I": _Source.number,
    b"L": _Source.number,
    b"J": lambda source: source.signed(4),
    b"K": lambda source: source.unsigned(1),
    b"M": lambda source: source.unsigned(2),
    b"\x8a": lambda source: int.from_bytes(source.counted(1), "little", signed=True),
    b"T": lambda source: source.counted(4),
    b"U": lambda source: source.counted(1),
    b"B": lambda source: source.counted(4),
    b"C": lambda source: source.counted(1),
    b"\x8e": lambda source: source.counted(8),
    b"\x96": lambda source: source.counted(8),
    b"V": lambda source: _decode(source.line(), "raw_unicode_escape"),
    b"X": lambda source: source.text(4),
    b"\x8c": lambda source: source.text(1),
    b"\x8d": lambda source: source.text(8),
    b"c": lambda source: _known(
        Name(_decode(source.line(), "utf-8"), _decode(source.line(), "utf-8"))
    ),
}
# Opcodes about the pickle's format, with the number of bytes that follow.
_NOTES: Final = {b"\x80": 1, b"\x95": 8}
_PUT: Final[dict[bytes, Callable[[_Source], int]]] = {
    b"p": _Source.number,
    b"q": lambda source: source.unsigned(1),
    b"r": lambda source: source.unsigned(4),
}
_GET: Final = {b"g": _PUT[b"p"], b"h": _PUT[b"q"], b"j": _PUT[b"r"]}


@dataclass
class _Machine:
    """The interpreter's state: a stack, the stacks set aside at marks, and the memo."""

    source: _Source
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    n_encoded: int = 0

    def run(self) -> Any:
        """Follow the opcodes to the end."""
        for _ in range(_MOST_OPCODES):
            opcode = self.source.take(1)
            if opcode == b".":
                return self.pop()
            if opcode in _VALUES:
                self.push(_VALUES[opcode](self.source))
            elif opcode in _NOTES:
                self.source.take(_NOTES[opcode])
            elif opcode in _PUT:
                self.memo[_PUT[opcode](self.source)] = self.top()
            elif opcode in _GET:
                self.push(self._recall(_GET[opcode](self.source)))
            elif opcode in _STEPS:
                _STEPS[opcode](self)
            else:
                _refuse(f"its pickle holds opcode 0x{opcode.hex()}, which no plain data needs")
        _refuse(f"its pickle has more than {_MOST_OPCODES:,} opcodes")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else _refuse("its pickle pops an empty stack")

    def top(self) -> Any:
        return self.stack[-1] if self.stack else _refuse("its pickle pops an empty stack")

    def _recall(self, key: int) -> Any:
        return self.memo[key] if key in self.memo else _refuse("its pickle recalls an unknown item")

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        """Pop all values pushed since the mark."""
        if not self.below:
            _refuse("its pickle has lost a mark")
        items, self.stack = self.stack, self.below.pop()
        return items

    def make_tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            _refuse("its pickle appends to something other than a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        keys = items[::2]
        # A tuple of tuples could be nested too deeply to be hashed.
        if type(target) is not dict or len(items) % 2 or not all(map(_is_key, keys)):
            _refuse("its pickle holds a malformed dict")
        target.update(zip(keys, items[1::2], strict=True))

    def make_dict(self) -> None:
        items = self.pop_to_mark()
        self.push({})
        self.set_items(items)

    def name(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            _refuse("its pickle holds a malformed name")
        self.push(_known(Name(module, name)))

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        if type(args) is not tuple or type(function) is not Name:
            _refuse("its pickle holds a malformed call")
        self.push(self._encode(args) if function == _ENCODE else Call(function, args))

    def _encode(self, args: tuple[Any, ...]) -> bytes:
        """Return bytes from protocols 0 to 2, which store them as latin1 text."""
        match args:
            case (str(text), "latin1" | b"latin1"):
                self.n_encoded += len(text)
            case _:
                _refuse("its pickle holds malformed bytes")
        # A pickle may recall one text many times.
        if self.n_encoded > self.source.n_bytes:
            _refuse("its pickle holds more bytes than its file")
        try:
            return text.encode("latin1")
        except UnicodeEncodeError:
            _refuse("its pickle holds malformed bytes")

    def set_state(self) -> None:
        state, target = self.pop(), self.top()
        if type(target) is not Call or target.state is not None:
            _refuse("its pickle sets the state of plain data")
        target.state = state


def _is_key(key: Any) -> bool:
    return type(key) in (bytes, str)


_STEPS: Final[dict[bytes, Callable[[_Machine], None]]] = {
    b"\x94": _Machine.memoize,
    b"(": _Machine.mark,
    b"a": lambda machine: machine.extend([machine.pop()]),
    b"e": lambda machine: machine.extend(machine.pop_to_mark()),
    b"s": lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    b"u": lambda machine: machine.set_items(machine.pop_to_mark()),
    b"l": lambda machine: machine.push(machine.pop_to_mark()),
    b"t": lambda machine: machine.push(tuple(machine.pop_to_mark())),
    b"d": _Machine.make_dict,
    b"\x85": lambda machine: machine.make_tuple(1),
    b"\x86": lambda machine: machine.make_tuple(2),
    b"\x87": lambda machine: machine.make_tuple(3),
    b"\x93": _Machine.name,
    b"R": _Machine.call,
    b"b": _Machine.set_state,
}
