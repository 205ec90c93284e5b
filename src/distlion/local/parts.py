"""Parts of the parameters that take turns to vote, so that traffic is even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distlion.step.param import VotingParam


def divide(sizes: Sequence[int], n_parts: int) -> list[int]:
    """Divide tensors, in their order, into parts of about equally many elements.

    A part takes the next tensor if that brings it closer to an equal share of the rest. It leaves
    at least one tensor for each later part. Tensors without elements count for nothing.

    Args:
        sizes: Elements of each tensor; at least ``n_parts`` of them have some.
        n_parts: Number of parts.

    Returns:
        The number of each tensor's part, which never falls.
    """
    left, n_left = sum(sizes), sum(size > 0 for size in sizes)
    numbers, part, held = [], 0, 0
    for size in sizes:
        n_open = n_parts - part
        # In integers: on which side of left / n_open the part ends closer to it.
        is_closer_without = n_open * (2 * held + size) > 2 * left
        if held and size and n_open > 1 and (is_closer_without or n_left < n_open):
            left, part, held = left - held, part + 1, 0
        held += size
        n_left -= size > 0
        numbers.append(part)
    return numbers


def take_turns(params: Sequence[VotingParam], n_parts: int) -> list[VotingParam]:
    """Return parameters that carry the number of their part."""
    turns = divide([param.make.shape.numel() for param in params], n_parts)
    return [replace(param, turn=turn) for param, turn in zip(params, turns, strict=True)]
