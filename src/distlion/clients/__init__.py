"""Votes of clients: ballots, and a server that keeps the parameters and uses no network."""

from distlion.clients.ballot import RULES, Ballot, Call, cast_ballot
from distlion.clients.count import weigh
from distlion.clients.metrics import average_metrics
from distlion.clients.places import Places, find_deltas, list_statistics
from distlion.clients.refusals import Refusal
from distlion.clients.server import Outcome, VoteServer
from distlion.clients.settings import ServerSettings

__all__ = [
    "RULES",
    "Ballot",
    "Call",
    "Outcome",
    "Places",
    "Refusal",
    "ServerSettings",
    "VoteServer",
    "average_metrics",
    "cast_ballot",
    "find_deltas",
    "list_statistics",
    "weigh",
]
