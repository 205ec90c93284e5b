"""Rules as text and back, without eval: what a checkpoint holds."""

from __future__ import annotations

import ast

import torch

from distlion.aggregation.average import Average
from distlion.aggregation.base import Aggregation
from distlion.aggregation.full_precision import FullPrecision
from distlion.aggregation.majority import MajorityVote
from distlion.aggregation.quantized import QuantizedVote
from distlion.aggregation.ternary import TernaryVote
from distlion.errors import CheckpointError, DistlionError

RULES: dict[str, type[Aggregation]] = {
    rule.__name__: rule
    for rule in (MajorityVote, TernaryVote, Average, QuantizedVote, FullPrecision)
}


# What ast and the rules raise on text that is none of ours, absurdly nested text included.
REFUSALS = (
    ValueError,
    SyntaxError,
    KeyError,
    TypeError,
    AttributeError,
    MemoryError,
    RecursionError,
    DistlionError,
)


def parse_rule(text: str) -> Aggregation:
    """Rebuild a rule from its ``repr``.

    Raises:
        CheckpointError: The text is not the ``repr`` of a rule of this version.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call with keywords")
        arguments = {str(keyword.arg): _parse_value(keyword.value) for keyword in call.keywords}
        return RULES[call.func.id](**arguments)
    except REFUSALS as error:
        known = ", ".join(sorted(RULES))
        raise CheckpointError(
            f"aggregation rule {text!r} cannot be rebuilt ({error}); known rules: {known}"
        ) from error


def _parse_value(node: ast.expr) -> object:
    """Read a literal, or a dtype written as torch.<name>."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ):
        dtype = getattr(torch, node.attr)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch.{node.attr} is not a dtype")
        return dtype
    return ast.literal_eval(node)
