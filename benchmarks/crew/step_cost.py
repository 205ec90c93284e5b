"""Time steps with a crew beside steps without one, on the same hosts of the network lab."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, fields, replace
from itertools import product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distlion_netlab import Lab
from distlion_netlab.launch import HostProcesses, place_ranks, show_line

WORKERS = (2, 4)
PARAMETERS = (1_000_000, 8_000_000)
RATES = ("unlimited", "1gbit")
MODES = ("without", "with")
TURN_S, LEAST_STEPS = 2.0, 12
WARM_STEPS = 12
REST_S = 5.0
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "DISTLION_CREW_SECRET": "of this benchmark"}
STORE_PORT, MASTER_PORT = 29400, 29500
PROGRAM = Path(__file__).with_name("cost_worker.py")


@dataclass(frozen=True)
class Block:
    """Time of the steps of one turn, all by the same processes.

    Attributes:
        whole_s: Of a training step, the lower quartile.
        alone_s: Of the optimizer's ``step()``, the lower quartile.
        cpu_s: Processor time of a step, all workers and threads together.
    """

    whole_s: float
    alone_s: float
    cpu_s: float


class Listener:
    """Pass on what processes print, and hear the store.

    Attributes:
        store_listens: Whether it has said so.
    """

    def __init__(self) -> None:
        self.store_listens = False

    def __call__(self, rank: int, is_error: bool, line: bytes) -> None:
        if line.startswith(b"the store listens"):
            self.store_listens = True
        elif is_error:
            show_line(rank, is_error, line)


class Hosts:
    """Workers that step with a crew or without one, one on each host.

    Args:
        lab: The hosts.
        processes: Which start and end them.
        listener: Of what they print.
        n_parameters: Of the network.
        mode: "with" or "without".
    """

    def __init__(
        self, lab: Lab, processes: HostProcesses, listener: Listener, n_parameters: int, mode: str
    ) -> None:
        self._processes = processes
        address = lab.plan.address(0)
        placements = place_ranks(lab.n_hosts, 1)
        if mode == "with":
            command = [sys.executable, "-m", "distlion", "crew", "--port", str(STORE_PORT)]
            keeper = replace(placements[0], rank=len(placements))
            processes.start(lab, keeper, command, {})
            while not listener.store_listens:  # workers do not wait for it
                processes.serve(timeout_s=1)
        self._calls: list[Connection] = []
        for placement in placements:
            ours, theirs = Pipe()
            arguments = [str(theirs.fileno()), str(n_parameters)]
            arguments += [f"{address}:{STORE_PORT}", str(lab.n_hosts), mode]
            processes.start(
                lab,
                placement,
                [sys.executable, str(PROGRAM), *arguments],
                placement.environment(address, MASTER_PORT) | QUIET,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._calls.append(ours)
        self.n_parameters = self._collect()[0]

    def ask(self, *call: Any) -> list[Any]:
        """Let all workers do something, and return what each found."""
        for connection in self._calls:
            connection.send(call)
        return self._collect()

    def _collect(self) -> list[Any]:
        answers = []
        for connection in self._calls:
            while not connection.poll(0.01):
                self._processes.serve(timeout_s=0)
            answers.append(connection.recv())
        return answers

    def time_turn(self) -> Block:
        """Return what steps of a turn took, after some for warmth."""
        usual_s = self.time_steps(WARM_STEPS).whole_s
        return self.time_steps(max(LEAST_STEPS, round(TURN_S / usual_s)))

    def time_steps(self, steps: int) -> Block:
        """Return what steps took; all workers end a step together, so that rank 0 speaks for all.

        A machine that others share makes many steps longer, and none shorter: a low one counts.
        """
        found = self.ask("run", steps)
        whole, alone, _ = found[0]
        cpu_s = sum(each[2] for each in found) / steps
        return Block(_take_low(whole), _take_low(alone), cpu_s)

    def measure_rest(self) -> float:
        """Return the share of a core that a process takes while it does nothing."""
        before = self.ask("rest")
        time.sleep(REST_S)
        after = self.ask("rest")
        return statistics.mean(late - early for early, late in zip(before, after, strict=True)) / (
            REST_S
        )


def measure_cost(turns: int) -> dict[str, Any]:
    """Measure all numbers of workers, sizes and rates; processes are new in each turn.

    Returns:
        ``rows``, and ``conditions``: the hosts' congestion control.
    """
    rows, conditions = [], {}
    for n_workers, n_wanted in product(WORKERS, PARAMETERS):
        blocks: dict[tuple[str, str], list[Block]] = {each: [] for each in product(RATES, MODES)}
        for turn in range(turns):
            for mode in MODES if turn % 2 else MODES[::-1]:
                listener = Listener()
                with Lab(n_workers) as lab, HostProcesses(listener) as processes:
                    conditions = {"tcp_congestion_control": lab.congestion_control}
                    hosts = Hosts(lab, processes, listener, n_wanted, mode)
                    n_parameters = hosts.n_parameters
                    for rate in RATES:
                        lab.set_rates(rate)
                        blocks[rate, mode].append(hosts.time_turn())
                    if mode == "with":
                        rest = hosts.measure_rest()
            sys.stderr.write(f"{n_workers} workers, {n_parameters:,}: turn {turn + 1}\n")
            sys.stderr.flush()
        for rate in RATES:
            found = {mode: blocks[rate, mode] for mode in MODES}
            row = {"workers": n_workers, "parameters": n_parameters, "rate": rate, "turns": turns}
            rows.append(row | compare_modes(found))
        rows[-1]["rest"] = rest
    return {"conditions": conditions, "rows": rows}


def compare_modes(blocks: dict[str, list[Block]]) -> dict[str, Any]:
    """Return medians of both modes, and of the ratios of a turn the median and the quartiles."""
    row = {}
    for field in fields(Block):
        old, new = ([getattr(each, field.name) for each in blocks[mode]] for mode in MODES)
        ratios = [after / before for before, after in zip(old, new, strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4)
        row[field.name] = {
            "without": statistics.median(old),
            "with": statistics.median(new),
            "ratio": median,
            "lower": lower,
            "upper": upper,
        }
    return row


def _take_low(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]
