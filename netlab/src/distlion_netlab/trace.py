"""A trace of one step on a worker: when each part of a vote began and ended, on which thread."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from distlion.kernels.cpu import CpuKernels
from distlion.optim import DistributedLion
from distlion.step.bucket import Bucket
from distlion.votes.bucket_vote import BucketCount, BucketVote
from distlion.wire.gloo import GlooTransfer

STEP, OPTIMIZER = "step", "optimizer.step()"
_TRACED: tuple[tuple[type, str, str], ...] = (
    (DistributedLion, "step", OPTIMIZER),
    (Bucket, "load", "load gradients"),
    (BucketVote, "encode", "encode"),
    (CpuKernels, "write_frames", "write frames"),
    (GlooTransfer, "wait", "wait"),
    (CpuKernels, "read_frames", "check frames"),
    (BucketCount, "reduce", "count"),
    (Bucket, "commit", "commit"),
)
PARTS = tuple(label for *_, label in _TRACED[1:])
"""Parts of a vote, in their order; none contains another."""


@dataclass(frozen=True)
class Span:
    """A part of a step on one thread.

    Attributes:
        what: ``STEP``, ``OPTIMIZER`` or one of ``PARTS``.
        is_main: Whether it ran on the main thread, not on that of votes during backward.
        begin_s, end_s: Seconds of the machine's monotonic clock, the same for all hosts of a lab.
    """

    what: str
    is_main: bool
    begin_s: float
    end_s: float


def trace_step(step: Callable[[], None]) -> list[Span]:
    """Do a step, and return its spans in the order of their ends."""
    spans: list[Span] = []
    with ExitStack() as stack:
        for owner, name, label in _TRACED:
            timed = _time(getattr(owner, name), label, spans)
            stack.enter_context(patch.object(owner, name, timed))
        with _timing(STEP, spans):
            step()
    return spans


def _time(function: Callable[..., Any], label: str, spans: list[Span]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        with _timing(label, spans):
            return function(*args, **options)

    return timed


@contextmanager
def _timing(label: str, spans: list[Span]) -> Iterator[None]:
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        spans.append(Span(label, is_main, begin_s, time.perf_counter()))
