"""Cost of sending and receiving in a lab: time on the links, and time of the compute cores."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from distlion.wire import LinkModel
from distlion_netlab.fleet import Fleet

_PROCESSOR_TIMES = Path("/proc/stat")
# The kernel counts in ticks of 10 ms: long enough for many of them.
_MEASURED_S = 0.5
# Upper limit of a chunk; a chunk is smaller where this one would outlast the measurement.
_MOST_CHUNK_BYTES = 512 * 1024
_MOST_ELEMENTS = 1 << 20
_LEAST = 1024


@dataclass(frozen=True)
class Traffic:
    """Cost of one kind of messages, if a host sends as much as it receives.

    Attributes:
        rate_bit_per_s: Bits that a host sends in a second, without latency.
        core_s_per_byte: Seconds of a core for each byte that the busiest host sends, the mean over
            all hosts.
    """

    rate_bit_per_s: float
    core_s_per_byte: float


def measure_votes(fleet: Fleet, link: LinkModel, hosts: int) -> Traffic:
    """Measure the exchange of chunks among all hosts for about half a second.

    Chunks have the size for a model of some ten million parameters. They are smaller on links that
    cannot carry them in that time. Other load on the machine is counted too.

    Args:
        fleet: The workers, one on each host.
        link: Probed link between them.
        hosts: Number of hosts.
    """
    run = _Run(fleet, link, hosts, "exchange", sent_by_unit=hosts - 1, rounds=1)
    return run.measure(_MOST_CHUNK_BYTES)


def measure_gradients(fleet: Fleet, link: LinkModel, hosts: int) -> Traffic:
    """Measure all-reduces of float32 gradients by the process group, as ``measure_votes`` does."""
    sent_by_unit, rounds = 2 * (hosts - 1) / hosts * 4, 2 * (hosts - 1)
    run = _Run(fleet, link, hosts, "all_reduce", sent_by_unit=sent_by_unit, rounds=rounds)
    return run.measure(_MOST_ELEMENTS)


def read_busy_s() -> float:
    """Read the busy seconds of all cores of this machine since it started, added up."""
    fields = _PROCESSOR_TIMES.read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure_server(fleet: Fleet, link: LinkModel, hosts: int) -> Traffic:
    """Measure chunks from all hosts to the first one, as ``measure_votes`` does.

    The way back is alike. One receiver at a time reaches a higher rate than all of them at once.
    """
    run = _Run(fleet, link, hosts, "gather", sent_by_unit=hosts - 1, rounds=1)
    one_way = run.measure(_MOST_CHUNK_BYTES)
    return replace(one_way, core_s_per_byte=2 * one_way.core_s_per_byte)


@dataclass(frozen=True)
class _Run:
    """One kind of collective call; its unit is a byte of a chunk, or an element."""

    fleet: Fleet
    link: LinkModel
    hosts: int
    verb: str
    sent_by_unit: float
    rounds: int

    def measure(self, most_units: int) -> Traffic:
        unit_s = self.link.transfer_s(self.sent_by_unit, self.sent_by_unit)
        units = min(most_units, max(_LEAST, int(_MEASURED_S / unit_s)))
        times = max(1, math.ceil(_MEASURED_S / (units * unit_s)))
        self.fleet.ask(self.verb, units, 1)
        busy_s, started_s = read_busy_s(), time.perf_counter()
        self.fleet.ask(self.verb, units, times)
        seconds, busy_s = time.perf_counter() - started_s, read_busy_s() - busy_s
        sent_bytes = times * units * self.sent_by_unit
        # At least half of the time counts as transfer, whatever the noise of the latency.
        transfer_s = max(seconds - times * self.rounds * self.link.latency_s, seconds / 2)
        return Traffic(8 * sent_bytes / transfer_s, busy_s / (self.hosts * sent_bytes))
