"""Transports that carry bytes between workers: Gloo between processes, memory within one."""

from distlion.transport.background import run_in_background
from distlion.transport.base import (
    MOST_BYTES_AT_ONCE,
    ONE_ROUND,
    ByteCount,
    Transfer,
    Transport,
    all_gather_rounds,
    gather_bytes,
)
from distlion.transport.gloo import Gloo, let_go_of_failed
from distlion.transport.groups import (
    carries_host_memory,
    drop_store,
    find_limit,
    find_start,
    keep,
    keep_store,
    own_group,
    store_of,
    tidy,
)
from distlion.transport.memory import Memory, connect_in_memory
from distlion.transport.roll_call import BUSY_TIMEOUT_S
from distlion.transport.turns import NO_OPTIMIZER, Turn, find_minority
from distlion.transport.watch import PeerWatch, is_registered, watch_peers

__all__ = [
    "BUSY_TIMEOUT_S",
    "MOST_BYTES_AT_ONCE",
    "NO_OPTIMIZER",
    "ONE_ROUND",
    "ByteCount",
    "Gloo",
    "Memory",
    "PeerWatch",
    "Transfer",
    "Transport",
    "Turn",
    "all_gather_rounds",
    "carries_host_memory",
    "connect_in_memory",
    "drop_store",
    "find_limit",
    "find_minority",
    "find_start",
    "gather_bytes",
    "is_registered",
    "keep",
    "keep_store",
    "let_go_of_failed",
    "own_group",
    "run_in_background",
    "store_of",
    "tidy",
    "watch_peers",
]
