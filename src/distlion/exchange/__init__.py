"""Who sends which bytes to whom, over a process group: one file for each pattern."""

from distlion.exchange.all_gather import AllGather
from distlion.exchange.all_reduce import AllReduce
from distlion.exchange.base import (
    Ballot,
    Exchange,
    PartialReducer,
    Reducer,
    Reply,
    Work,
    fire_framed,
)
from distlion.exchange.frame import (
    MAX_WORKERS,
    PROTOCOL_VERSION,
    Chunk,
    ChunkKind,
    Header,
    Status,
    read_chunks,
    write_chunk,
)
from distlion.exchange.link import ByteCount, Link, carries_host_memory, gather_bytes, tidy
from distlion.exchange.node_frames import NodeFrames, gather_flags, share_verdict
from distlion.exchange.numbers import (
    gather_numbers,
    gather_sample,
    plan_numbers,
    plan_sample,
)
from distlion.exchange.parameter_server import ParameterServer
from distlion.exchange.pipeline import Exchanging, Pipeline, run_all
from distlion.exchange.registry import PATTERNS, list_patterns, parse_pattern
from distlion.exchange.turns import NO_OPTIMIZER, Turn
from distlion.exchange.verdict import (
    Verdict,
    find_errors,
    minority,
    with_error,
    with_error_of,
    with_verdict,
    worst_of,
)
from distlion.exchange.watch import PeerWatch, is_registered, keep_forever, store_of, watch_peers

__all__ = [
    "MAX_WORKERS",
    "NO_OPTIMIZER",
    "PATTERNS",
    "PROTOCOL_VERSION",
    "AllGather",
    "AllReduce",
    "Ballot",
    "ByteCount",
    "Chunk",
    "ChunkKind",
    "Exchange",
    "Exchanging",
    "Header",
    "Link",
    "NodeFrames",
    "ParameterServer",
    "PartialReducer",
    "PeerWatch",
    "Pipeline",
    "Reducer",
    "Reply",
    "Status",
    "Turn",
    "Verdict",
    "Work",
    "carries_host_memory",
    "find_errors",
    "fire_framed",
    "gather_bytes",
    "gather_flags",
    "gather_numbers",
    "gather_sample",
    "is_registered",
    "keep_forever",
    "list_patterns",
    "minority",
    "parse_pattern",
    "plan_numbers",
    "plan_sample",
    "read_chunks",
    "run_all",
    "share_verdict",
    "store_of",
    "tidy",
    "watch_peers",
    "with_error",
    "with_error_of",
    "with_verdict",
    "worst_of",
    "write_chunk",
]
