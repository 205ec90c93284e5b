"""The rules, one file each, and the vote on a bucket, without a network."""

from distlion.votes.aggregation import Aggregation
from distlion.votes.average import Average
from distlion.votes.bucket_vote import BucketVote, make_worker_state
from distlion.votes.majority import MajorityVote
from distlion.votes.masked import MaskedVote
from distlion.votes.quantized import QuantizedVote
from distlion.votes.registry import RULES, SCALED_RULES, list_rule_names
from distlion.votes.residual import ResidualVote
from distlion.votes.roster import Roster
from distlion.votes.scaled import ScaledVote

__all__ = [
    "RULES",
    "SCALED_RULES",
    "Aggregation",
    "Average",
    "BucketVote",
    "MajorityVote",
    "MaskedVote",
    "QuantizedVote",
    "ResidualVote",
    "Roster",
    "ScaledVote",
    "list_rule_names",
    "make_worker_state",
]
