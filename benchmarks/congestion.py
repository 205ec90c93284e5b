"""Time an all-to-all between two workers over each TCP congestion control that the kernel offers.

    python benchmarks/congestion.py [--controls cubic reno bbr] [--kilobytes 64 256 1024 4096]
                                    [--rates unlimited 1gbit | --loopback] [--turns 20]

Each worker has a network namespace of this machine (`distlion netlab`); with `--loopback` they
share one. This needs Linux and root rights. A connection keeps the congestion control of its
start: the workers have one process group for each, and these take turns. In a turn an all-to-all
is repeated, and the median counts. A ratio is the median, with quartiles, of those of neighboring
turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlion_netlab import Lab
from distlion_netlab.launch import MASTER_PORT, HostProcesses, place_ranks, show_line

OFFERED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
WORKERS = 2
LOOPBACK = "loopback"
KILOBYTE = 1024
WARM_UP, REPETITIONS = 3, 8
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def work(connection: Connection) -> None:
    """Make process groups and time all-to-alls, as asked, until the pipe closes.

    A call is the name of a congestion control, which connects a group, or such a name with the
    bytes for each peer; the answer to that is the median seconds.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    connection.send(None)
    groups: dict[str, Any] = {}
    while True:
        try:
            call = connection.recv()
        except EOFError:
            break
        if isinstance(call, str):
            groups[call] = dist.new_group(backend="gloo")
            connection.send(None)
        else:
            control, peer_bytes = call
            connection.send(time_exchange(groups[control], peer_bytes))
    # A thread of Gloo may still hold a tensor, which can abort the interpreter's shutdown.
    os._exit(0)


def time_exchange(group: Any, peer_bytes: int) -> float:
    """Return the median seconds of an all-to-all."""
    sent = torch.zeros(WORKERS * peer_bytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    for _ in range(WARM_UP):
        exchange(received, sent, group)
    return statistics.median(exchange(received, sent, group) for _ in range(REPETITIONS))


def exchange(received: Tensor, sent: Tensor, group: Any) -> float:
    """Return the seconds of one all-to-all."""
    began_s = time.perf_counter()
    dist.all_to_all_single(received, sent, group=group)
    return time.perf_counter() - began_s


class Workers:
    """Two processes with a process group for each congestion control.

    On a lab of one host they are connected by its loopback device.
    """

    def __init__(self, lab: Lab, processes: HostProcesses, controls: Sequence[str]) -> None:
        self._calls: list[Connection] = []
        device = {"GLOO_SOCKET_IFNAME": "lo"} if lab.n_hosts == 1 else {}
        for placement in place_ranks(lab.n_hosts, WORKERS // lab.n_hosts):
            ours, theirs = Pipe()
            processes.start(
                lab,
                placement,
                [sys.executable, str(Path(__file__).resolve()), "--serve", str(theirs.fileno())],
                placement.environment(lab.plan.address(0), MASTER_PORT) | QUIET | device,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._calls.append(ours)
        self._collect()
        for control in controls:
            lab.set_congestion_control(control)
            self._ask(control)

    def time_exchange(self, control: str, peer_bytes: int) -> float:
        """Return the median seconds of an all-to-all, of the slower worker."""
        return max(self._ask((control, peer_bytes)))

    def _ask(self, call: Any) -> list[Any]:
        for connection in self._calls:
            connection.send(call)
        return self._collect()

    def _collect(self) -> list[Any]:
        return [connection.recv() for connection in self._calls]


def measure(
    controls: Sequence[str], rates: Sequence[str], sizes: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Return the seconds of all turns by congestion control, for each rate and size.

    Without rates, workers are on one host.
    """
    rows = []
    with Lab(WORKERS if rates else 1) as lab, HostProcesses(show_line) as processes:
        workers = Workers(lab, processes, controls)
        for rate in rates or [LOOPBACK]:
            if rate != LOOPBACK:
                lab.set_rates(rate)
            for peer_bytes in sizes:
                seconds: dict[str, list[float]] = {control: [] for control in controls}
                for turn in range(turns):
                    first = turn % len(controls)
                    for control in [*controls[first:], *controls[:first]]:
                        seconds[control].append(workers.time_exchange(control, peer_bytes))
                rows.append({"rate": rate, "peer_bytes": peer_bytes, "seconds": seconds})
    return rows


def write_table(rows: Sequence[dict[str, Any]], controls: Sequence[str]) -> list[str]:
    """Return a Markdown table: milliseconds, and ratios to the first congestion control."""
    baseline, *others = controls
    head = ["rate", "KB a peer", *(f"{control}, ms" for control in controls)]
    head += [f"{control} / {baseline}" for control in others]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        seconds = row["seconds"]
        cells = [row["rate"], f"{row['peer_bytes'] / KILOBYTE:g}"]
        cells += [f"{1e3 * statistics.median(seconds[control]):.3g}" for control in controls]
        cells += [describe_ratio(seconds[control], seconds[baseline]) for control in others]
        lines.append(cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def describe_ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return median and quartiles of the ratios of turns."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({lower:.2f} - {upper:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--controls", nargs="+", help="cubic, if there is one, and all others")
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit"])
    parser.add_argument("--loopback", action="store_true", help="both workers on one host")
    parser.add_argument("--kilobytes", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--turns", type=int, default=20, help="at least 2")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        work(Connection(args.serve))
    offered = sorted(OFFERED.read_text().split(), key=lambda name: (name != "cubic", name))
    controls = args.controls or offered
    load = os.getloadavg()[0]
    sizes = [KILOBYTE * size for size in args.kilobytes]
    rows = measure(controls, [] if args.loopback else args.rates, sizes, args.turns)
    print("\n".join(write_table(rows, controls)))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
