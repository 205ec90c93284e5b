"""A worker of a sweep: it follows its parent's orders on one host of a lab."""

from __future__ import annotations

import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from distlion.wire import Gloo, LinkModel, Transport, probe_link
from distlion.wire.groups import own_group
from distlion.wire.tcp import choose_wire, link_over
from distlion_lab.planning.bench import measure_kernels
from distlion_lab.planning.machine import Machine
from distlion_netlab.calls import Answer, Block, Call
from distlion_netlab.lab_run import LabRun, start_run
from distlion_netlab.trace import Span, trace_step
from distlion_netlab.workload import Workload

_PROBE_TIMEOUT_S = 60.0
_COUNTERS = Path("/proc/self/net/snmp")


class SweepWorker:
    """The methods built in this process, and the orders that a parent may give."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._runs: dict[str, LabRun] = {}
        self._voters: Transport | None = None

    def build(self, name: str, workload: Workload) -> int:
        """Build a method, in place of an earlier one of that name; count its parameters."""
        self._runs.pop(name, None)
        self._runs[name] = start_run(name, workload, rank=self._rank)
        return self._runs[name].n_parameters

    def drop(self, name: str) -> None:
        """Forget a method."""
        self._runs.pop(name, None)

    def run_block(self, name: str, steps: int) -> Block:
        """Do steps between two barriers."""
        run = self._runs[name]
        dist.barrier()
        retransmitted = _read_retransmitted()
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(steps):
            run.step()
        run.wait_for_device()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        dist.barrier()
        return Block(
            seconds,
            cpu_seconds,
            _read_retransmitted() - retransmitted,
            run.sent_bytes(),
            run.wire_bytes(),
        )

    def probe(self) -> LinkModel:
        """Measure the link with all workers sending at once; equal on all of them."""
        assert dist.group.WORLD is not None
        return probe_link(Gloo(dist.group.WORLD, timeout_s=_PROBE_TIMEOUT_S), step=0)

    def exchange(self, chunk_bytes: int, times: int) -> None:
        """Exchange a chunk with each peer, as votes are exchanged, ``times`` times in sequence."""
        link = self._link_voters()
        chunks = torch.zeros(link.n_members, chunk_bytes, dtype=torch.uint8, device="cpu")
        received = torch.zeros_like(chunks)
        for _ in range(times):
            link.all_to_all(received, chunks, step=0).wait()

    def gather(self, chunk_bytes: int, times: int) -> None:
        """Send a chunk to the first worker, as to a parameter server, ``times`` times."""
        link = self._link_voters()
        chunk = torch.zeros(chunk_bytes, dtype=torch.uint8, device="cpu")
        out = torch.zeros(link.n_members, chunk_bytes, dtype=torch.uint8, device="cpu")
        for _ in range(times):
            link.gather(out if link.rank == 0 else None, chunk, step=0).wait()
        dist.barrier()

    def all_reduce(self, n_elements: int, times: int) -> None:
        """Sum float32 gradients over all workers, ``times`` times in sequence."""
        gradients = torch.zeros(n_elements, dtype=torch.float32, device="cpu")
        for _ in range(times):
            dist.all_reduce(gradients)

    def measure_kernels(self) -> Machine:
        """Measure the kernels."""
        return measure_kernels().machine

    def trace(self, name: str) -> list[Span]:
        """Do a step after a barrier, and return when its parts began and ended."""
        dist.barrier()
        return trace_step(self._runs[name].step)

    def verify(self, name: str) -> None:
        """Check that all workers hold the same parameters."""
        self._runs[name].verify_replicas()

    def _link_voters(self) -> Transport:
        """Return a link as votes have it, over the transport that is the default."""
        if self._voters is None:
            assert dist.group.WORLD is not None
            wire, limit_s = choose_wire(), _PROBE_TIMEOUT_S
            group = own_group(dist.group.WORLD, name="probes", timeout_s=limit_s, wire=wire)
            self._voters = link_over(group, timeout_s=limit_s)
        return self._voters


def _read_retransmitted() -> int:
    """Read the number of TCP segments that this process's network namespace has sent again."""
    names, values = (
        line.split() for line in _COUNTERS.read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def serve(connection: Connection, worker: SweepWorker) -> None:
    """Answer calls until the parent closes the pipe."""
    while True:
        try:
            call: Call = connection.recv()
        except EOFError:
            return
        try:
            answer = Answer(getattr(worker, call.verb)(*call.arguments))
        # A method that cannot run here must not end the others; the parent reports it.
        except Exception as error:  # noqa: BLE001
            if dist.get_rank() == 0:
                traceback.print_exc()
            answer = Answer(refusal=f"{type(error).__name__}: {error}")
        connection.send(answer)


def list_cores(rank: int, n_hosts: int) -> set[int]:
    """List the cores of a host: its own ones if there are enough, else all."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[rank::n_hosts]) if n_hosts <= len(cores) else set(cores)


def main() -> None:
    """Join the other workers, and serve.

    The first argument of the program is the descriptor of the worker's end of a two-way pipe, for
    calls and answers.
    """
    torch.set_num_threads(1)
    os.sched_setaffinity(0, list_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    connection = Connection(int(sys.argv[1]))
    dist.init_process_group("gloo")
    connection.send(Answer())
    serve(connection, SweepWorker(dist.get_rank()))
    sys.stderr.flush()
    # A thread of Gloo may still hold a tensor, which can abort the interpreter's shutdown.
    os._exit(0)
