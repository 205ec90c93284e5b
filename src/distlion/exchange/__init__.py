"""Patterns in which workers exchange votes over a process group: one file for each."""

from distlion.exchange.all_gather import AllGather
from distlion.exchange.all_reduce import AllReduce
from distlion.exchange.base import (
    Ballot,
    Cost,
    Exchange,
    Exchanging,
    PartialReducer,
    Reducer,
    Reply,
    fire_framed,
)
from distlion.exchange.frame import (
    MAX_WORKERS,
    PROTOCOL_VERSION,
    Chunk,
    ChunkKind,
    Chunks,
    Header,
    read_chunks,
    write_chunk,
)
from distlion.exchange.node_frames import NodeFrames, gather_flags, share_verdict, swap_payloads
from distlion.exchange.numbers import (
    gather_numbers,
    gather_sample,
    plan_numbers,
    plan_sample,
)
from distlion.exchange.parameter_server import ParameterServer
from distlion.exchange.recursive_doubling import RecursiveDoubling
from distlion.exchange.registry import PATTERNS, list_patterns, parse_pattern
from distlion.exchange.verdict import (
    Verdict,
    find_errors,
    minority,
    with_error,
    with_error_of,
    with_verdict,
    worst_of,
)

__all__ = [
    "MAX_WORKERS",
    "PATTERNS",
    "PROTOCOL_VERSION",
    "AllGather",
    "AllReduce",
    "Ballot",
    "Chunk",
    "ChunkKind",
    "Chunks",
    "Cost",
    "Exchange",
    "Exchanging",
    "Header",
    "NodeFrames",
    "ParameterServer",
    "PartialReducer",
    "RecursiveDoubling",
    "Reducer",
    "Reply",
    "Verdict",
    "find_errors",
    "fire_framed",
    "gather_flags",
    "gather_numbers",
    "gather_sample",
    "list_patterns",
    "minority",
    "parse_pattern",
    "plan_numbers",
    "plan_sample",
    "read_chunks",
    "share_verdict",
    "swap_payloads",
    "with_error",
    "with_error_of",
    "with_verdict",
    "worst_of",
    "write_chunk",
]
