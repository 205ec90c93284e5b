"""What a worker knows of itself and its machine."""

from __future__ import annotations

from dataclasses import dataclass

from distlion.lab.planning.bench import KernelRates


@dataclass(frozen=True)
class WorkerReport:
    """What a worker knows of itself.

    Attributes:
        host: Its machine's name.
        cpu: Its machine's processor.
        cores: Those that the process may use.
        threads: Those that torch uses.
        interface: GLOO_SOCKET_IFNAME, or "".
        loopback: Whether Gloo would find this host under a loopback address.
        denormals: Whether denormal numbers are kept.
        debug: Whether torch was built for debugging.
        kernels: How fast it is.
    """

    host: str
    cpu: str
    cores: int
    threads: int
    interface: str
    loopback: bool
    denormals: bool
    debug: bool
    kernels: KernelRates
