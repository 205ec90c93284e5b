"""Read a pickle as plain data: a small interpreter that looks up no name and calls nothing.

``pickletools`` takes it apart into opcodes, which it never follows.

Names, calls and states of a pickle become inert records. Only ``build_bytes_array`` knows one use
of them, the pickle of a uint8 array, and builds the array from its bytes after a check.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from distlion_lab.errors import DataError

# A batch of 10,000 images takes at most 120,000 opcodes; each makes at most one small object.
_MOST_OPCODES = 1 << 19
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
    return _Machine(data).run()


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


def _known(name: Name) -> Name:
    return name if name in _KNOWN else _refuse(f"its pickle asks for {str(name)[:100]!r}")


# Opcodes by the names that pickletools has for them: those that push something new, what follows
# them, or a string of Python 2; and those about the format.
_MADE: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_NUMBERS = ("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_GIVEN: Final = {*_NUMBERS, *_BYTES, *_TEXTS}
_OLD: Final = {"BINSTRING", "SHORT_BINSTRING"}
_NOTES: Final = {"PROTO", "FRAME"}
_PUT: Final = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET: Final = {"GET", "BINGET", "LONG_BINGET"}


def _read_opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the opcodes in front of the last one, each with what follows it."""
    opcodes = pickletools.genops(data)
    try:
        for opcode, argument, _ in islice(opcodes, _MOST_OPCODES):
            if opcode.name == "STOP":
                return
            yield opcode.name, argument
    except ValueError as error:
        raise DataError(f"its pickle is damaged: {str(error)[:100]}") from error
    _refuse(f"its pickle has more than {_MOST_OPCODES:,} opcodes")


@dataclass
class _Machine:
    """The interpreter's state: a stack, the stacks set aside at marks, and the memo."""

    data: bytes
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    n_encoded: int = 0

    def run(self) -> Any:
        """Follow the opcodes to the end."""
        for name, argument in _read_opcodes(self.data):
            if name in _STEPS:
                _STEPS[name](self)
            elif name in _PUT:
                self.memo[argument] = self.top()
            elif name in _GET:
                self.push(self._recall(argument))
            elif name not in _NOTES:
                self.push(self._make(name, argument))
        return self.pop()

    def _make(self, name: str, argument: Any) -> Any:
        if name in _MADE:
            return _MADE[name]()
        if name in _GIVEN:
            return argument
        if name in _OLD:
            return argument.encode("latin1")
        if name == "BYTEARRAY8":
            return bytes(argument)
        if name == "GLOBAL":
            return _known(Name(*argument.split(" ", 1)))
        _refuse(f"its pickle holds opcode {name}, which no plain data needs")

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
        if self.n_encoded > len(self.data):
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


_STEPS: Final[dict[str, Callable[[_Machine], None]]] = {
    "MEMOIZE": _Machine.memoize,
    "MARK": _Machine.mark,
    "APPEND": lambda machine: machine.extend([machine.pop()]),
    "APPENDS": lambda machine: machine.extend(machine.pop_to_mark()),
    "SETITEM": lambda machine: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine: machine.set_items(machine.pop_to_mark()),
    "LIST": lambda machine: machine.push(machine.pop_to_mark()),
    "TUPLE": lambda machine: machine.push(tuple(machine.pop_to_mark())),
    "DICT": _Machine.make_dict,
    "TUPLE1": lambda machine: machine.make_tuple(1),
    "TUPLE2": lambda machine: machine.make_tuple(2),
    "TUPLE3": lambda machine: machine.make_tuple(3),
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.set_state,
}
