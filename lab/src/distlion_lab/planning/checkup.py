"""Examine the workers of a process group: machines, kernels, links, and their faults."""

from __future__ import annotations

import math
import os
import platform
import socket
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distlion.errors import KernelBackendError, ProcessGroupError
from distlion.kernels import check_denormals
from distlion.wire import Gloo
from distlion.wire.ask import ask
from distlion_lab.planning.bench import KernelRates, measure_kernels
from distlion_lab.planning.link_probe import LinkProbe, probe_ranks
from distlion_lab.planning.machine import Machine
from distlion_lab.planning.quantity import format_rate
from distlion_lab.planning.worker_report import WorkerReport, decode_report, encode_report

_TIMEOUT_S = 60.0
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_SLOW_AFTER_PAUSE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_KEEPS_ITS_RATE = ("bbr", "bbr2", "bbr3")
"""Congestion controls that keep their rate over a pause."""
_LONG_S = 5e-3
"""Latency from which a slow start of TCP takes longer than most exchanges of votes."""
# A rank is called slow from here on; less is within the noise of a probe.
_SLOW = 1.5
# The kernels reach 0.9 and more of a streaming read on an idle machine.
_LEAST_ENCODE_RATIO = 0.4
# An idle machine gives a worker all of its core, but for moments.
_LEAST_CORE_SHARE = 0.9


@dataclass(frozen=True)
class Checkup:
    """Findings of an examination; equal on all ranks.

    Attributes:
        workers: Reports of all workers, in rank order.
        link: The link's probe, over all ranks and rank by rank.
        warnings: Faults to look at.
    """

    workers: tuple[WorkerReport, ...]
    link: LinkProbe
    warnings: tuple[str, ...]

    @property
    def slowest_kernels(self) -> int:
        """The rank with the slowest commit; the first if several are equal."""
        rates = _commit_rates(self.workers)
        return rates.index(min(rates))

    @property
    def machine(self) -> Machine:
        """The slowest worker's arithmetic while all work, whose threads may share cores.

        The kernels are measured at their best: a worker has a core to itself now and then, even
        where cores are too few.
        """
        crowding = max((threads / cores for _, threads, cores in _count_threads(self.workers)))
        return self.workers[self.slowest_kernels].kernels.machine.slowed(max(1.0, crowding))

    @property
    def kernels_slowdown(self) -> float:
        """Ratio of the median rank's commit rate to the slowest rank's."""
        rates = _commit_rates(self.workers)
        return statistics.median(rates) / min(rates)


def examine(observe: Callable[[str], None]) -> Checkup:
    """Examine all workers of the default process group; every rank must call it.

    Args:
        observe: Called with a description of each part before it starts.

    Raises:
        ProcessGroupError: There is no process group.
        KernelBackendError: There are no kernels, or not the ones asked for.
        PeerLostError: A peer's connection closed.
        StepTimeoutError: A peer did not answer in time.
        CorruptFrameError: A peer sent something other than a report.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise ProcessGroupError("there is no process group to examine; call init_process_group")
    link = Gloo(group, timeout_s=_TIMEOUT_S)
    observe("measuring the kernels")
    dist.barrier()
    own = report_worker(measure_kernels())
    rows = enumerate(ask(link, encode_report(own), step=0))
    workers = tuple(decode_report(row, rank=rank) for rank, row in rows)
    observe(f"probing the links of {link.n_members} workers")
    probe = probe_ranks(link, step=0)
    return Checkup(workers, probe, find_faults(workers, probe))


def report_worker(kernels: KernelRates) -> WorkerReport:
    """Describe this process and its machine."""
    host = socket.gethostname()
    return WorkerReport(
        host=host,
        cpu=_name_cpu(),
        cores=count_cores(),
        affinity=f"{sum(1 << core for core in _list_cores()):x}",
        threads=torch.get_num_threads(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        loopback=_resolves_to_loopback(host),
        congestion_control=_read(_CONGESTION_CONTROL),
        slow_after_pause=_read(_SLOW_AFTER_PAUSE) == "1",
        denormals=_keeps_denormals(),
        debug=bool(torch.version.debug),
        kernels=kernels,
    )


def find_faults(workers: Sequence[WorkerReport], probe: LinkProbe) -> tuple[str, ...]:
    """List faults that make steps slow or wrong, each with its remedy."""
    faults = [fault for rank, worker in enumerate(workers) for fault in _own_faults(rank, worker)]
    faults += _crowded_hosts(workers)
    if len({worker.host for worker in workers}) > 1:
        faults += _loopback_faults(workers)
    if len(workers) > 1 and probe.combined.latency_s >= _LONG_S:
        faults += _pause_faults(workers, probe.combined.latency_s)
    if len(workers) > 2 and probe.slowdown > _SLOW:
        slow = probe.slowest
        rate = format_rate(probe.ranks[slow].rate_bit_per_s)
        faults.append(
            f"rank {slow} ({workers[slow].host}) has the slowest link: {rate}/s, "
            f"{probe.slowdown:.1f} times slower than the median rank; every step waits for it"
        )
    rates = _commit_rates(workers)
    slowdown = statistics.median(rates) / min(rates)
    if slowdown > _SLOW:
        slow = rates.index(min(rates))
        faults.append(
            f"rank {slow} ({workers[slow].host}) has the slowest kernels: {min(rates) / 1e9:.1f} "
            f"GB/s, {slowdown:.1f} times slower than the median rank; does something else run "
            "there?"
        )
    return tuple(faults)


def _own_faults(rank: int, worker: WorkerReport) -> list[str]:
    faults = []
    if worker.kernels.kernels == "reference":
        faults.append(f"rank {rank}: DISTLION_KERNELS=reference chooses the slow kernels; unset it")
    elif worker.kernels.core_share < _LEAST_CORE_SHARE:
        faults.append(
            f"rank {rank}: the machine is busy: while its kernels were measured, this worker had a "
            f"core for {worker.kernels.core_share:.0%} of the time. The rates are too low; measure "
            "again when nothing else runs"
        )
    elif worker.kernels.encode_ratio < _LEAST_ENCODE_RATIO:
        faults.append(
            f"rank {rank}: encoding reaches {worker.kernels.encode_ratio:.0%} of a plain read, "
            f"with a core of its own and the kernels {worker.kernels.kernels}; on an idle machine "
            f"it reaches more than {_LEAST_ENCODE_RATIO:.0%}. Measure again when nothing else uses "
            "its memory"
        )
    if worker.debug:
        faults.append(f"rank {rank}: this torch is a debug build; install a release")
    if not worker.denormals:
        faults.append(
            f"rank {rank}: denormals are flushed to zero, which DistributedLion refuses; call "
            "torch.set_flush_denormal(False)"
        )
    return faults


def _crowded_hosts(workers: Sequence[WorkerReport]) -> list[str]:
    return [
        f"{host}: its workers use {threads} threads on {cores} cores; start fewer workers or set "
        "OMP_NUM_THREADS lower"
        for host, threads, cores in _count_threads(workers)
        if threads > cores
    ]


def _count_threads(workers: Sequence[WorkerReport]) -> list[tuple[str, int, int]]:
    """List each host with its most crowded set of cores: the threads bound to it, and its cores.

    Workers that are bound to other cores, as by ``torchrun --numa-binding``, do not share them.
    """
    crowded: dict[str, tuple[int, int]] = {}
    for worker in workers:
        allowed = int(worker.affinity, 16)
        threads = sum(
            each.threads
            for each in workers
            if each.host == worker.host and not int(each.affinity, 16) & ~allowed
        )
        found = (threads, worker.cores)
        crowded[worker.host] = max(
            crowded.get(worker.host, found), found, key=lambda each: each[0] / each[1]
        )
    return [(host, *found) for host, found in crowded.items()]


def _loopback_faults(workers: Sequence[WorkerReport]) -> list[str]:
    return [
        f"rank {rank} ({worker.host}): Gloo uses the loopback interface although there are several "
        "hosts; set GLOO_SOCKET_IFNAME to the network's interface"
        for rank, worker in enumerate(workers)
        if worker.interface.startswith("lo") or (not worker.interface and worker.loopback)
    ]


def _pause_faults(workers: Sequence[WorkerReport], latency_s: float) -> list[str]:
    hosts = {
        worker.host: None
        for worker in workers
        if worker.slow_after_pause and worker.congestion_control not in _KEEPS_ITS_RATE
    }
    if not hosts:
        return []
    return [
        f"{', '.join(hosts)}: a round takes {1e3 * latency_s:.0f} ms, and TCP begins slowly again "
        "after each pause, so that large votes take several rounds more. On every host: sysctl -w "
        "net.ipv4.tcp_slow_start_after_idle=0"
    ]


def _commit_rates(workers: Sequence[WorkerReport]) -> list[float]:
    return [worker.kernels.machine.commit_bytes_per_s for worker in workers]


def _name_cpu() -> str:
    """Name the processor as Linux does; elsewhere as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def count_cores() -> int:
    """Count the cores that this process may use, within the limit of its control group."""
    cores = len(_list_cores())
    try:
        quota, period = map(int, _CPU_LIMIT.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return cores
    return max(1, min(cores, math.ceil(quota / period)))


def _list_cores() -> Collection[int]:
    """List the cores to which this process is bound; all where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _resolves_to_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except (OSError, UnicodeError):  # a name of 64 characters is none of the name service
        return False


def _read(setting: Path) -> str:
    """Read a setting of TCP for new connections; only Linux tells it."""
    try:
        return setting.read_text().strip()
    except OSError:
        return ""


def _keeps_denormals() -> bool:
    try:
        check_denormals()
    except KernelBackendError:
        return False
    return True
