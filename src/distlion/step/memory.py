"""Checks that parameters share no memory: shared elements would be voted on and moved twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError


def check_own_memory(param: Tensor, name: str) -> None:
    """Raise InvalidArgumentError if elements of a parameter share memory."""
    if _overlaps_itself(param):
        raise InvalidArgumentError(
            f"{name} overlaps itself in memory (shape {tuple(param.shape)}, strides "
            f"{param.stride()}); call .clone() first"
        )


def check_shared_memory(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise InvalidArgumentError if elements of two parameters share memory."""
    placed = [
        (str(param.device), *_range_bytes(param), param, name)
        for param, name in zip(params, names, strict=True)
        if param.numel()
    ]
    placed.sort(key=lambda place: place[:3])
    reaching: list[tuple[str, int, int, Tensor, str]] = []
    for place in placed:
        device, start, _, param, name = place
        reaching = [earlier for earlier in reaching if earlier[0] == device and earlier[2] > start]
        for *_, other, other_name in reaching:
            if _overlap(other, param):
                raise InvalidArgumentError(
                    f"{other_name} and {name} overlap in memory, so that shared elements would be "
                    "voted on and moved twice; give one of them, or a .clone() to each"
                )
        reaching.append(place)


def _range_bytes(param: Tensor) -> tuple[int, int]:
    """Return the first address of a nonempty tensor, and the one after its last."""
    start = param.data_ptr()
    return start, start + _count_reached(param) * param.element_size()


def _count_reached(param: Tensor) -> int:
    """Count the elements from the first one in memory to the last one."""
    sizes = zip(param.shape, param.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _overlaps_itself(param: Tensor) -> bool:
    dims = sorted(
        (stride, size) for size, stride in zip(param.shape, param.stride(), strict=True) if size > 1
    )
    reached = 1
    is_nested = param.numel() > 0
    for stride, size in dims:
        is_nested &= stride >= reached
        reached += (size - 1) * stride
    if is_nested or not param.numel():
        return False
    if any(stride == 0 for stride, _ in dims):
        return True
    # Interleaved dims may still not overlap: shape (2, 3), strides (3, 2).
    return int(_mark(param, reached).sum()) < param.numel()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element, which columns of one matrix do not."""
    if one.element_size() != other.element_size():
        return True
    distance, rest = divmod(other.data_ptr() - one.data_ptr(), one.element_size())
    if rest:
        return True
    marks = _mark(one, max(_count_reached(one), distance + _count_reached(other)))
    return bool(marks.as_strided(other.shape, other.stride(), distance).any())


def _mark(param: Tensor, n_elements: int) -> Tensor:
    """Mark the places of a tensor's elements, from its first one on: (n_elements,) bool."""
    marks = torch.zeros(n_elements, dtype=torch.bool, device="cpu")
    marks.as_strided(param.shape, param.stride()).fill_(True)
    return marks
