"""The number of local workers that a machine holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.checkup import count_cores
from distlion_lab.tasks.base import Task
from distlion_lab.training.train_settings import DEFAULT_WORKERS, TrainSettings

THREADS_PER_CORE = 4
"""Threads of all workers together, for each core; more would only wait for each other."""

# Measured with forked workers that share the modules of their server: 0.2 GiB each.
WORKER_BYTES = 256 << 20
# Parameter, gradient and momentum, and a step's temporary tensors.
PARAMETER_BYTES = 16
# In addition: AdamW's second moment, the common point, its bfloat16 momentum, delta and residual.
LOCAL_BYTES = 18

_MEMORY_FILE = Path("/proc/meminfo")
_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


@dataclass(frozen=True)
class Machine:
    """Resources that local workers share.

    Attributes:
        cores: Cores that this process may use.
        memory_bytes: Free memory; None where the system does not report it.
    """

    cores: int
    memory_bytes: int | None


def read_machine() -> Machine:
    """Read the machine's resources, within the limits of this process's control group."""
    found = [size for size in (_read_available(), _read_limit()) if size is not None]
    return Machine(count_cores(), min(found, default=None))


def _read_available() -> int | None:
    try:
        lines = _MEMORY_FILE.read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) << 10 if kilobytes else None


def _read_limit() -> int | None:
    try:
        limit, current = (path.read_text().strip() for path in _LIMIT_FILES)
    except OSError:
        return None
    return max(0, int(limit) - int(current)) if limit.isdigit() and current.isdigit() else None


def check_capacity(settings: TrainSettings, task: Task, machine: Machine) -> None:
    """Refuse more local workers than the machine's cores and memory can hold.

    Cores hold 4 threads each, or 4 workers in all. Memory holds workers of 256 MiB and 16 bytes
    for each parameter, 34 with local steps; activations are not counted.

    Raises:
        InvalidArgumentError: There are too many workers; the message names the number that fits.
    """
    by_cores = max(DEFAULT_WORKERS, THREADS_PER_CORE * machine.cores // settings.threads)
    if settings.workers > by_cores:
        raise InvalidArgumentError(
            f"workers is {settings.workers} with {_count(settings.threads, 'thread')} each, and "
            f"{_count(machine.cores, 'core')} hold {by_cores}; use {by_cores} or --oversubscribe"
        )
    if machine.memory_bytes is None or settings.workers <= 1:
        return
    each_bytes = PARAMETER_BYTES + (0 if settings.every is None else LOCAL_BYTES)
    needed_bytes = WORKER_BYTES + each_bytes * _count_parameters(task, settings.seed)
    by_memory = max(1, machine.memory_bytes // needed_bytes)
    if settings.workers > by_memory:
        raise InvalidArgumentError(
            f"workers is {settings.workers} of about {needed_bytes / 1e9:.1f} GB each, and "
            f"{machine.memory_bytes / 1e9:.1f} GB of free memory hold {by_memory}; use {by_memory} "
            "or --oversubscribe"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count_parameters(task: Task, seed: int) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in task.build_model(seed=seed).parameters())
