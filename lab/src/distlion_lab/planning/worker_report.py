"""A worker's report on itself and its machine, and its bytes as JSON: nothing is unpickled."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from distlion.errors import CorruptFrameError
from distlion_lab.planning.bench import KernelRates
from distlion_lab.planning.machine import Machine


@dataclass(frozen=True)
class WorkerReport:
    """A worker's report on itself.

    Attributes:
        host: Name of its machine.
        cpu: Processor of its machine.
        cores: Number of cores that the process may use.
        affinity: Set of cores to which the process is bound, as a hexadecimal mask.
        threads: Number of threads that torch uses.
        interface: GLOO_SOCKET_IFNAME, or "".
        loopback: True if Gloo would find this host under a loopback address.
        congestion_control: TCP congestion control of its new connections; "" if the system does
            not tell.
        slow_after_pause: True if TCP begins slowly again after each pause of a connection.
        denormals: True if denormal numbers are kept.
        debug: True if torch was built for debugging.
        kernels: Rates of its kernels.
    """

    host: str
    cpu: str
    cores: int
    affinity: str
    threads: int
    interface: str
    loopback: bool
    congestion_control: str
    slow_after_pause: bool
    denormals: bool
    debug: bool
    kernels: KernelRates


def encode_report(report: WorkerReport) -> bytes:
    """Encode a report."""
    return json.dumps(dataclasses.asdict(report)).encode()


def decode_report(record: bytes, *, rank: int) -> WorkerReport:
    """Decode the record of a rank.

    Raises:
        CorruptFrameError: ``record`` is no report.
    """
    try:
        fields = json.loads(record)
        int(fields["affinity"], 16)
        kernels = fields.pop("kernels")
        machine = Machine(**_checked(Machine, kernels.pop("machine")))
        rates = KernelRates(**_checked(KernelRates, kernels | {"machine": machine}))
        return WorkerReport(**_checked(WorkerReport, fields | {"kernels": rates}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFrameError(
            f"rank {rank} sent no report of itself ({error!r}); does it run another version?",
            rank=rank,
            culprits=(rank,),
        ) from error


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "Machine": (Machine,),
    "KernelRates": (KernelRates,),
}


def _checked(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Check that each field of a dataclass is present and has its type."""
    for field in dataclasses.fields(kind):
        value = fields[field.name]
        if type(value) not in _KINDS[str(field.type)]:
            raise TypeError(f"{field.name} = {value!r}")
    return fields
