"""The only list of all patterns, by the names that commands take."""

from __future__ import annotations

from distlion.wire.all_gather import AllGather
from distlion.wire.all_reduce import AllReduce
from distlion.wire.parameter_server import ParameterServer
from distlion.wire.pattern import Exchange
from distlion.wire.recursive_doubling import RecursiveDoubling

PATTERNS: dict[str, Exchange] = {
    "all-reduce": AllReduce(),
    "all-gather": AllGather(),
    "parameter-server": ParameterServer(),
    "recursive-doubling": RecursiveDoubling(),
}
"""A new pattern is one file, its test, and one line here.

The optimizer's "auto", the commands, the planner and the tests read this list; of equally fast
patterns "auto" takes the first.
"""


def list_patterns() -> str:
    """List the patterns as Python expressions, for errors."""
    return ", ".join(map(repr, PATTERNS.values()))
