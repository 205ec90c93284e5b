"""Votes of clients: ballots, and a server that keeps the parameters and uses no network."""

from distlion_flower.ballot import RULES, Ballot, Call, cast_ballot
from distlion_flower.count import weigh
from distlion_flower.metrics import average_metrics
from distlion_flower.places import Places, find_deltas, find_equal, list_statistics
from distlion_flower.refusals import Refusal
from distlion_flower.server import Outcome, VoteServer
from distlion_flower.settings import ServerSettings
from distlion_flower.virtual import VirtualClients

__all__ = [
    "RULES",
    "Ballot",
    "Call",
    "Outcome",
    "Places",
    "Refusal",
    "ServerSettings",
    "VirtualClients",
    "VoteServer",
    "average_metrics",
    "cast_ballot",
    "find_deltas",
    "find_equal",
    "list_statistics",
    "weigh",
]
