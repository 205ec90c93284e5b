"""A worker's report on itself and its machine."""

from __future__ import annotations

from dataclasses import dataclass

from distlion_lab.planning.bench import KernelRates


@dataclass(frozen=True)
class WorkerReport:
    """A worker's report on itself.

    Attributes:
        host: Name of its machine.
        cpu: Processor of its machine.
        cores: Number of cores that the process may use.
        threads: Number of threads that torch uses.
        interface: GLOO_SOCKET_IFNAME, or "".
        loopback: True if Gloo would find this host under a loopback address.
        congestion_control: TCP congestion control of its new connections; "" if the system does
            not tell.
        denormals: True if denormal numbers are kept.
        debug: True if torch was built for debugging.
        kernels: Rates of its kernels.
    """

    host: str
    cpu: str
    cores: int
    threads: int
    interface: str
    loopback: bool
    congestion_control: str
    denormals: bool
    debug: bool
    kernels: KernelRates
