"""Rules of the vote: the encoding of votes, their count and the reply; one file for each rule."""

from distlion.aggregation.average import Average
from distlion.aggregation.base import Aggregation
from distlion.aggregation.estimate import EstimateVote
from distlion.aggregation.feedback import FeedbackVote
from distlion.aggregation.full_precision import FullPrecision
from distlion.aggregation.majority import MajorityVote
from distlion.aggregation.masked import MaskedVote
from distlion.aggregation.quantized import QuantizedVote
from distlion.aggregation.registry import (
    RULES,
    SCALED_RULES,
    NamedRule,
    list_rule_names,
    list_worker_state,
    parse_rule,
)
from distlion.aggregation.residual import ResidualVote
from distlion.aggregation.scaled import ScaledVote
from distlion.aggregation.stochastic import StochasticVote
from distlion.aggregation.ternary import TernaryVote

__all__ = [
    "RULES",
    "SCALED_RULES",
    "Aggregation",
    "Average",
    "EstimateVote",
    "FeedbackVote",
    "FullPrecision",
    "MajorityVote",
    "MaskedVote",
    "NamedRule",
    "QuantizedVote",
    "ResidualVote",
    "ScaledVote",
    "StochasticVote",
    "TernaryVote",
    "list_rule_names",
    "list_worker_state",
    "parse_rule",
]
