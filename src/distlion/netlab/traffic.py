"""What sending and receiving takes in a lab: of the links, and of the cores that compute."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from distlion.link import LinkModel
from distlion.netlab.crew import Crew

_PROCESSOR_TIMES = Path("/proc/stat")
# The kernel counts in ticks of 10 ms: long enough to be many of them.
_MEASURED_S = 0.5
# Of votes a chunk to each peer, as of a model of some ten million parameters; of gradients an
# all-reduce, a part of what DDP sends at once so that slow links take no minutes.
_CHUNK_BYTES = 512 * 1024
_GRADIENT_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Traffic:
    """What a kind of messages takes, while all hosts send as much as they receive.

    Attributes:
        rate_bit_per_s: Bits that a host sends in a second.
        core_s_per_byte: Seconds of a core for each byte that a host sends.
    """

    rate_bit_per_s: float
    core_s_per_byte: float


def measure_votes(crew: Crew, link: LinkModel, hosts: int) -> Traffic:
    """Let all hosts exchange chunks with each other for half a second.

    Whatever else runs on the machine is counted too.

    Args:
        crew: The workers, one on each host.
        link: Between them, as probed.
        hosts: Their number.
    """
    return _measure(crew, link, hosts, "exchange", _CHUNK_BYTES, (hosts - 1) * _CHUNK_BYTES)


def measure_gradients(crew: Crew, link: LinkModel, hosts: int) -> Traffic:
    """Let all hosts sum float32 gradients by the process group, as ``measure_votes``."""
    sent_bytes = 2 * (hosts - 1) / hosts * 4 * _GRADIENT_ELEMENTS
    return _measure(crew, link, hosts, "all_reduce", _GRADIENT_ELEMENTS, sent_bytes)


def read_busy_s() -> float:
    """Read how many seconds the cores of this machine have worked since it started, together."""
    fields = _PROCESSOR_TIMES.read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _measure(
    crew: Crew, link: LinkModel, hosts: int, verb: str, size: int, sent_bytes: float
) -> Traffic:
    times = max(1, math.ceil(_MEASURED_S / link.transfer_s(sent_bytes, sent_bytes)))
    crew.ask(verb, size, 1)
    busy_s, started_s = read_busy_s(), time.perf_counter()
    crew.ask(verb, size, times)
    seconds, busy_s = time.perf_counter() - started_s, read_busy_s() - busy_s
    return Traffic(8 * times * sent_bytes / seconds, busy_s / (hosts * times * sent_bytes))
