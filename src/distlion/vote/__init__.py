"""The vote on one bucket without a network: from votes to bytes, and from these to a reply."""

from distlion.vote.bucket_vote import BucketCount, BucketVote, WorkerState, make_worker_state
from distlion.vote.reply import ParameterReply
from distlion.vote.roster import MOST_VOTES, MOST_WEIGHT, Roster
from distlion.vote.scaling import ScalingVote
from distlion.vote.tally import RuleTally

__all__ = [
    "MOST_VOTES",
    "MOST_WEIGHT",
    "BucketCount",
    "BucketVote",
    "ParameterReply",
    "Roster",
    "RuleTally",
    "ScalingVote",
    "WorkerState",
    "make_worker_state",
]
