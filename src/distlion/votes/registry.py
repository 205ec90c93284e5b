"""The rules by name, as command lines and checkpoints give them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import torch

from distlion.errors import CheckpointError, DistlionError
from distlion.votes.aggregation import Aggregation
from distlion.votes.average import Average
from distlion.votes.estimate import EstimateVote
from distlion.votes.feedback import MOST_BITS, FeedbackVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.majority import MajorityVote
from distlion.votes.masked import MaskedVote
from distlion.votes.quantized import MAX_BITS, QuantizedVote
from distlion.votes.residual import ResidualVote
from distlion.votes.scaled import ScaledVote
from distlion.votes.stochastic import StochasticVote
from distlion.votes.ternary import TernaryVote


@dataclass(frozen=True)
class NamedRule:
    """A rule that a user may name.

    Attributes:
        rule: The rule.
        description: A phrase for help and reports.
        listed: Whether a table of all rules shows it; unlisted rules lie between listed ones.
    """

    rule: Aggregation
    description: str
    listed: bool = True


LONGEST_RULE = 200
"""Most characters of a rule's ``repr`` in a file; longer text is not even parsed."""

RULES: dict[str, NamedRule] = {
    "majority": NamedRule(MajorityVote(), "majority vote, random tie-breaking"),
    "majority-zero": NamedRule(MajorityVote(tie="zero"), "majority vote, 0 on a tie"),
    "ternary": NamedRule(TernaryVote(), "vote of -1, 0 or 1, 0 on a tie"),
    "masked": NamedRule(
        MaskedVote(), "majority of directions, 0 where that of gradients differs, for many workers"
    ),
    "masked-random": NamedRule(
        MaskedVote(tie="random"), "majority of directions, random where that of gradients differs"
    ),
    "average": NamedRule(Average(), "average of the signs"),
    **{
        f"quantized-{bits}": NamedRule(
            QuantizedVote(bits=bits),
            f"{bits}-bit votes, scaled by the mean magnitude",
            listed=bits in (2, 4, 8),
        )
        for bits in range(1, MAX_BITS + 1)
    },
    **{
        f"quantized-{bits}-linf": NamedRule(
            QuantizedVote(bits=bits, norm="linf"),
            f"{bits}-bit votes, scaled by the largest magnitude",
            listed=False,
        )
        for bits in range(1, MAX_BITS + 1)
    },
    **{
        f"feedback-{bits}": NamedRule(
            FeedbackVote(bits), f"{bits}-bit votes with error feedback, for skewed data"
        )
        for bits in range(1, MOST_BITS + 1)
    },
    "full-bf16": NamedRule(
        FullPrecision(torch.bfloat16), "sign of the mean of directions in bfloat16"
    ),
    "full": NamedRule(FullPrecision(), "sign of the mean of uncompressed directions"),
}
"""Every rule that commands, forecasts, the network lab and tests know.

A new rule is one line here; its class is then known to checkpoints too.
"""

SCALED_RULES: dict[str, Aggregation] = {
    "scaled": ScaledVote(),
    "stochastic": StochasticVote(),
    **{f"residual-{bits}": ResidualVote(bits) for bits in range(1, MOST_BITS + 1)},
    **{f"estimate-{bits}": EstimateVote(bits) for bits in range(1, MOST_BITS + 1)},
}
"""Every rule with a step length in its reply, for ``LocalSteps``; known to checkpoints."""

# Raised by ast and the rules on foreign text, absurdly nested text included.
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


def list_rule_names() -> list[str]:
    """Return the names for help and messages; rules of several bits are one name, with a P."""
    return list(dict.fromkeys(re.sub(r"-\d\b", "-P", name) for name in RULES))


def list_worker_state() -> list[str]:
    """Return the keys of a parameter's state that rules may use."""
    return list(dict.fromkeys(key for rule in _list_rules() for key in rule.worker_state))


def _list_rules() -> list[Aggregation]:
    return [*(named.rule for named in RULES.values()), *SCALED_RULES.values()]


def parse_rule(text: str) -> Aggregation:
    """Rebuild a rule from its ``repr``, without eval.

    Raises:
        CheckpointError: The text is not the ``repr`` of a rule of this version.
    """
    if len(text) > LONGEST_RULE:
        raise CheckpointError(
            f"an aggregation rule of {len(text):,} characters, beginning with "
            f"{text[:40]!r}, is not a rule; expected {LONGEST_RULE} at most"
        )
    classes = {type(rule).__name__: type(rule) for rule in _list_rules()}
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call with keywords")
        arguments = {str(keyword.arg): _parse_value(keyword.value) for keyword in call.keywords}
        return classes[call.func.id](**arguments)
    except REFUSALS as error:
        known = ", ".join(sorted(classes))
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
