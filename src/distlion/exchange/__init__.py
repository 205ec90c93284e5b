"""Who sends which bytes to whom, over a process group: one file for each pattern."""

from distlion.exchange.all_gather import AllGather
from distlion.exchange.all_reduce import AllReduce
from distlion.exchange.base import (
    Ballot,
    Exchange,
    Reducer,
    Reply,
    empty,
    fire_framed,
)
from distlion.exchange.frame import (
    BY_ALL,
    MAX_WORKERS,
    PROTOCOL_VERSION,
    Chunk,
    ChunkKind,
    Chunks,
    ChunkShape,
    Header,
    Status,
    read_chunks,
    write_chunk,
)
from distlion.exchange.link import MOST_BYTES_AT_ONCE, ByteCount, Link
from distlion.exchange.parameter_server import ParameterServer
from distlion.exchange.pipeline import Exchanging, Pipeline, run_all
from distlion.exchange.verdict import Verdict, find_errors, minority, with_error
from distlion.exchange.watch import PeerWatch, watch_peers

__all__ = [
    "BY_ALL",
    "MAX_WORKERS",
    "MOST_BYTES_AT_ONCE",
    "PROTOCOL_VERSION",
    "AllGather",
    "AllReduce",
    "Ballot",
    "ByteCount",
    "Chunk",
    "ChunkKind",
    "ChunkShape",
    "Chunks",
    "Exchange",
    "Exchanging",
    "Header",
    "Link",
    "ParameterServer",
    "PeerWatch",
    "Pipeline",
    "Reducer",
    "Reply",
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
