"""Reasons to refuse a ballot."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from distlion.layout import FLOAT_BYTES, BucketShape
from distlion_flower.ballot import MOST_EXAMPLES, Ballot, Call, compute_checksum


class Refusal(Enum):
    """The fault of a ballot, as named in logs and counters."""

    ERROR = "the client failed"
    MALFORMED = "it is not a ballot"
    NODE = "the node was not asked"
    SECOND = "the node has voted already"
    ROUND = "it is of another round"
    RULE = "it is of another rule"
    DTYPE = "its payload is not bytes"
    LENGTH = "its payload has another length"
    CHECKSUM = "its checksum is wrong"
    EXAMPLES = "its number of examples is not an integer above 0"
    SCALE = "a scale is negative, not finite or too large"


def read_scales(payload: bytes, shape: BucketShape, n_params: int) -> Tensor:
    """Read the scales after the bits of a payload with the right length: (n_params,) float32."""
    start = shape.vote_bytes - shape.scales_bytes
    tail = bytearray(payload[start : start + FLOAT_BYTES * n_params])
    return torch.frombuffer(tail, dtype=torch.float32)


def find_fault(
    ballot: Ballot, call: Call, shape: BucketShape, n_params: int, *, max_scale: float
) -> Refusal | None:
    """Return the fault of a ballot from a node that was asked, or None; raise nothing.

    Args:
        ballot: Ballot of any content.
        call: Call that it answers.
        shape: Sizes of a vote.
        n_params: Number of parameters with a scale.
        max_scale: Largest scale that is accepted.
    """
    if not _is_integer(ballot.round) or ballot.round != call.round:
        return Refusal.ROUND
    if ballot.rule != call.rule:
        return Refusal.RULE
    if not isinstance(ballot.payload, bytes):
        return Refusal.DTYPE
    if len(ballot.payload) != shape.vote_bytes:
        return Refusal.LENGTH
    if not _is_integer(ballot.n_examples) or not 1 <= ballot.n_examples < MOST_EXAMPLES:
        return Refusal.EXAMPLES
    expected = compute_checksum(
        call.round, call.rule, ballot.node, ballot.n_examples, ballot.payload
    )
    if not _is_integer(ballot.checksum) or ballot.checksum != expected:
        return Refusal.CHECKSUM
    scales = read_scales(ballot.payload, shape, n_params).tolist()
    if not all(math.isfinite(scale) and 0 <= scale <= max_scale for scale in scales):
        return Refusal.SCALE
    return None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
