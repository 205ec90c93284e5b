"""The section on MPI of the page of the wire's goals, out of the records of ``wire_mpi.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MPI = {
    f"wire_mpi/{transport}-{latency}": f"PYTHON benchmarks/wire_mpi.py --transport {transport} "
    f"--latency {latency}{less} --json benchmarks/results/wire_mpi/{transport}-{latency}.json"
    for latency, less in (("0", ""), ("50ms", " --turns 6 --bytes 64 1000000"))
    for transport in ("ofi", "ucx", "btl")
}
"""Records, and the commands that make them with a Python that has MPI."""
BESIDE_MPI = """\
An all-to-all and an all-gather of bytes, between two hosts of a network lab without a limit of
rate, over own sockets and MPI in turns in the same two workers. MPICH (ofi: libfabric over TCP;
ucx: UCX over TCP) takes 0.5 to 1.4 times as long as own sockets. It polls while it waits, which
takes the processor from training. After a kill it reported nothing within 20 s. Open MPI (btl: its
own sockets, with ULFM) reports the killed worker, and takes longer. So own sockets stay.
"""


def list_mpi(records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Write what a round takes over MPI and over own sockets, which took turns in its workers."""
    yield from ("## Beside MPI", "", BESIDE_MPI)
    yield "| over | link | bytes | own sockets, ms | MPI, ms | own, processor | MPI, processor |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for name in MPI:
        given = records[name]["conditions"]
        mpi = given["mpi"].partition(", package")[0].replace("Version:", "")
        who = f"{' '.join(mpi.split())}, {given['transport']}"
        for size, wires in records[name]["wall_and_processor_ms"].items():
            (own_ms, own_cpu_ms), (mpi_ms, mpi_cpu_ms) = wires["tcp"], wires["mpi"]
            figures = f"{own_ms:.2f} | {mpi_ms:.2f} | {own_cpu_ms:.2f} | {mpi_cpu_ms:.2f}"
            yield f"| {who} | {given['link']} | {int(size):,} | {figures} |"
    yield ""
    yield "| over | link | after the other worker was killed in a round |"
    yield "| --- | --- | --- |"
    for name in MPI:
        given = records[name]["conditions"]
        yield f"| {given['transport']} | {given['link']} | {records[name]['after_a_kill']} |"
    yield ""
