"""Who sends which bytes to whom, over a process group: one file for each pattern."""

from distlion.exchange.auto import choose_exchange
from distlion.exchange.base import Ballot, BucketShape, Exchange, Reducer, Reply
from distlion.exchange.direct import Direct
from distlion.exchange.frame import (
    MAX_WORKERS,
    PROTOCOL_VERSION,
    Header,
    Kind,
    Status,
    Verdict,
    minority,
)
from distlion.exchange.gather import Gather
from distlion.exchange.link import Link, Plan
from distlion.exchange.server import Server
from distlion.exchange.watch import PeerWatch, watch_peers

__all__ = [
    "MAX_WORKERS",
    "PROTOCOL_VERSION",
    "Ballot",
    "BucketShape",
    "Direct",
    "Exchange",
    "Gather",
    "Header",
    "Kind",
    "Link",
    "PeerWatch",
    "Plan",
    "Reducer",
    "Reply",
    "Server",
    "Status",
    "Verdict",
    "choose_exchange",
    "minority",
    "watch_peers",
]
