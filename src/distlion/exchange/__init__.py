"""Who sends which bytes to whom, over a process group: one file for each pattern."""

from distlion.exchange.base import (
    Ballot,
    BucketShape,
    Exchange,
    Reducer,
    Reply,
    empty,
    fire_framed,
)
from distlion.exchange.direct import Direct
from distlion.exchange.frame import (
    BY_ALL,
    MAX_WORKERS,
    PROTOCOL_VERSION,
    Chunk,
    Chunks,
    ChunkShape,
    Header,
    Kind,
    Status,
    read_chunks,
    write_chunk,
)
from distlion.exchange.gather import Gather
from distlion.exchange.link import MOST_BYTES_AT_ONCE, Link, Plan
from distlion.exchange.pipeline import Exchanging, Pipeline, run_all
from distlion.exchange.server import Server
from distlion.exchange.verdict import Verdict, find_errors, minority, with_error
from distlion.exchange.watch import PeerWatch, watch_peers

__all__ = [
    "BY_ALL",
    "MAX_WORKERS",
    "MOST_BYTES_AT_ONCE",
    "PROTOCOL_VERSION",
    "Ballot",
    "BucketShape",
    "Chunk",
    "ChunkShape",
    "Chunks",
    "Direct",
    "Exchange",
    "Exchanging",
    "Gather",
    "Header",
    "Kind",
    "Link",
    "PeerWatch",
    "Pipeline",
    "Plan",
    "Reducer",
    "Reply",
    "Server",
    "Status",
    "Verdict",
    "empty",
    "find_errors",
    "fire_framed",
    "minority",
    "read_chunks",
    "run_all",
    "watch_peers",
    "with_error",
    "write_chunk",
]
