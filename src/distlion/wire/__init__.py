"""Links, patterns and what both cost: bytes, never their meaning."""

from distlion.wire.all_gather import AllGather
from distlion.wire.all_reduce import AllReduce
from distlion.wire.cost import LinkModel
from distlion.wire.gloo import Gloo
from distlion.wire.groups import find_start
from distlion.wire.parameter_server import ParameterServer
from distlion.wire.pattern import Exchange
from distlion.wire.probe import probe_link
from distlion.wire.registry import PATTERNS
from distlion.wire.transport import MOST_BYTES_AT_ONCE, ByteCount, Transport

__all__ = [
    "MOST_BYTES_AT_ONCE",
    "PATTERNS",
    "AllGather",
    "AllReduce",
    "ByteCount",
    "Exchange",
    "Gloo",
    "LinkModel",
    "ParameterServer",
    "Transport",
    "find_start",
    "probe_link",
]
