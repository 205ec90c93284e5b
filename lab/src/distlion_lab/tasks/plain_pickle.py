"""Read a pickle of plain data and uint8 arrays, which finds inert stand-ins for all that it names.

A pickle is refused unless it has only the opcodes of such data, and names only what these arrays
need. The standard unpickler then follows it. It finds records in place of names, so nothing of
numpy is called; ``build_bytes_array`` builds an array from such a record after a check.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from distlion_lab.errors import DataError

# A batch of 10,000 images takes at most 120,000 opcodes; each makes at most one small object.
_MOST_OPCODES = 1 << 19
# It takes a tuple for each name of a file. Deeper ones would be hashed beyond the end of the stack.
_MOST_TUPLES = 1 << 14
_MOST_DIMS = 8
_OPCODES = """
NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1
BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 BINSTRING SHORT_BINSTRING
UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
GLOBAL STACK_GLOBAL REDUCE BUILD MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
PROTO FRAME STOP
"""
_PLAIN: Final = frozenset(_OPCODES.split())


@dataclass(frozen=True)
class Name:
    """A name in a pickle, which is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __call__(self, *args: Any) -> Call:
        """Record a call."""
        return Call(self, args)

    def __setstate__(self, state: Any) -> None:
        _refuse("its pickle sets the state of a name")


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

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            _refuse("its pickle sets a state twice")
        self.state = state


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
    _check_opcodes(data)
    try:
        return _Unpickler(data).load()
    except DataError:
        raise
    # An unpickler raises almost anything where a pickle is damaged.
    except Exception as error:
        raise DataError(f"its pickle is damaged: {str(error)[:100]}") from error


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
        isinstance(data, bytes | bytearray)
        and isinstance(shape, tuple)
        and len(shape) <= _MOST_DIMS
        and all(type(size) is int and 0 <= size <= len(data) for size in shape)
        and math.prod(shape) == len(data)
    )


def _refuse(why: str) -> NoReturn:
    raise DataError(why)


def _check_opcodes(data: bytes) -> None:
    """Check that a pickle has few opcodes, all of them of plain data, and no large memo."""
    tuples = 0
    try:
        for opcode, argument, _ in islice(pickletools.genops(data), _MOST_OPCODES):
            if opcode.name not in _PLAIN:
                _refuse(f"its pickle holds opcode {opcode.name}, which no plain data needs")
            tuples += opcode.name.startswith("TUPLE")
            if tuples > _MOST_TUPLES:
                _refuse(f"its pickle has more than {_MOST_TUPLES:,} tuples")
            # An unpickler's memo is a table up to the highest place.
            if opcode.name.endswith("PUT") and int(argument or 0) > _MOST_OPCODES:
                _refuse("its pickle has too large a memo")
            if opcode.name == "STOP":
                return
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"its pickle is damaged: {str(error)[:100]}") from error
    _refuse(f"its pickle has more than {_MOST_OPCODES:,} opcodes")


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds records in place of names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._encode = _Encode(len(data))

    def find_class(self, module: str, name: str) -> Any:
        found = Name(module, name)
        if found not in _KNOWN:
            _refuse(f"its pickle asks for {str(found)[:100]!r}")
        return self._encode if found == _ENCODE else found


@dataclass
class _Encode:
    """An encoder of the bytes of protocols 0 to 2, which store them as latin1 text.

    Attributes:
        left_bytes: Bytes that it still encodes: a pickle may recall one text many times.
    """

    left_bytes: int

    def __call__(self, *args: Any) -> bytes:
        match args:
            case (str(text), "latin1" | b"latin1"):
                self.left_bytes -= len(text)
            case _:
                _refuse("its pickle holds malformed bytes")
        if self.left_bytes < 0:
            _refuse("its pickle holds more bytes than its file")
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None:
        _refuse("its pickle sets the state of a name")
