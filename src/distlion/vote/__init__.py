"""The vote on one bucket without a network: from votes to bytes, and from these to a reply."""

from distlion.vote.bucket_vote import BucketCount, BucketVote, WorkerState, make_worker_state
from distlion.vote.reply import ParameterReply
from distlion.vote.roster import Roster
from distlion.vote.scaling import ScalingVote
from distlion.vote.tally import RuleTally

__all__ = [
    "BucketCount",
    "BucketVote",
    "ParameterReply",
    "Roster",
    "RuleTally",
    "ScalingVote",
    "WorkerState",
    "make_worker_state",
]
