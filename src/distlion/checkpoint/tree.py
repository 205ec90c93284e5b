"""Nested Python values as JSON beside tensors, so that reading a file runs no code."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlion.checkpoint.tensor_file import check_tensor
from distlion.errors import CheckpointError

TREE = "tree"
"""Name of the tensor that holds a file's JSON as bytes, as headers are limited in size."""
TAG = "$"
# Plain numbers: an array of objects would hold addresses.
_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}")
_SCALARS = (bool, int, float, str, type(None))
# Schedulers' states consist of these; a restored Counter must count again.
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_MAPPING_NAMES: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def encode_tree(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Turn a value into JSON values, and put its tensors and arrays aside.

    Args:
        value: None, numbers, strings, tensors, numpy arrays, and lists, tuples and dicts of them.
        place: Its name in errors.
        tensors: Dict that takes the tensors, by number, as two places may have the same name.

    Raises:
        CheckpointError: It holds anything else; names the place.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _SCALARS or isinstance(value, float | str):
        return value
    if isinstance(value, Tensor):
        check_tensor(place, value)  # here, as a tensor is put aside under a number
        return {TAG: "tensor", "name": _put(value, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        plain = np.require(value, requirements=["C", "W"])  # torch warns of one to read only
        row = torch.from_numpy(plain.reshape(-1).view(np.uint8))
        name = _put(row, tensors)
        return {TAG: "array", "name": name, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        items = [encode_tree(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        kind = _MAPPING_NAMES.get(type(value), "dict")
        pairs = [
            [
                encode_tree(key, f"a key of {place}", tensors),
                encode_tree(item, f"{place}.{key}", tensors),
            ]
            for key, item in value.items()
        ]
        return {TAG: kind, "items": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold without running code "
        "when it is read; give numbers, strings, tensors, arrays, and lists or dicts of them"
    )


def _put(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = f"tensor.{len(tensors)}"
    tensors[name] = tensor
    return name


def decode_tree(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Invert ``encode_tree``.

    Args:
        value: The value parsed from JSON.
        read: Function that returns a tensor by its name.

    Raises:
        CheckpointError: ``encode_tree`` cannot have made it.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list):
        return [decode_tree(item, read) for item in value]
    try:
        kind = value[TAG]
        if kind == "tensor":
            return read(value["name"])
        if kind == "array":
            row = read(value["name"]).numpy()
            return (
                row.view(_parse_dtype(value["dtype"])).reshape(_parse_shape(value["shape"])).copy()
            )
        items = value["items"]
        if kind == "tuple":
            return tuple(decode_tree(item, read) for item in items)
        pairs = [(decode_tree(key, read), decode_tree(item, read)) for key, item in items]
        return _MAPPINGS[kind](pairs)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a value of the checkpoint is malformed ({error!r})") from error


def _parse_dtype(text: Any) -> np.dtype[Any]:
    if type(text) is not str or not _DTYPE.fullmatch(text):
        raise CheckpointError(f"a value of the checkpoint is an array of {str(text)[:80]!r}")
    return np.dtype(text)


def _parse_shape(sizes: Any) -> list[int]:
    if type(sizes) is not list or not all(type(size) is int and size >= 0 for size in sizes):
        raise CheckpointError(f"a value of the checkpoint has shape {str(sizes)[:80]!r}")
    return sizes
