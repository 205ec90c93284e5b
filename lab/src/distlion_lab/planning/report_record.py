"""A worker's report as a fixed number of bytes: JSON, so that no peer's data is unpickled."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from distlion.errors import CorruptFrameError
from distlion_lab.planning.bench import KernelRates
from distlion_lab.planning.machine import Machine
from distlion_lab.planning.worker_report import WorkerReport

RECORD_BYTES = 4096
"""Size of each record."""

# Host names have at most 253 characters, interfaces 15; names of processors are short too.
_MOST_CHARACTERS = 256


def encode_report(report: WorkerReport) -> bytes:
    """Encode a report, its strings cut to 256 characters, padded with zero bytes."""
    fields = dataclasses.asdict(report)
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = value[:_MOST_CHARACTERS]
    # Escaped, a character outside of ASCII takes up to 12 bytes.
    data = json.dumps(fields).encode()
    if len(data) > RECORD_BYTES:
        data = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    assert len(data) <= RECORD_BYTES  # 4 strings of at most 1,024 bytes would need odd names all
    return data.ljust(RECORD_BYTES, b"\0")


def decode_report(record: bytes, *, rank: int) -> WorkerReport:
    """Decode the record of a rank.

    Raises:
        CorruptFrameError: ``record`` is no report.
    """
    try:
        fields = json.loads(record.rstrip(b"\0"))
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
