"""Time steps with a crew beside steps without one, on the same hosts of the network lab."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distlion.lab.netlab import Lab
from distlion.lab.netlab.launch import HostProcesses, place_ranks, show_line

WORKERS = (2, 4)
PARAMETERS = (1_000_000, 8_000_000)
RATES = ("unlimited", "1gbit")
MODES = ("without", "with")
BLOCK_S = 0.8
WARM_STEPS = 5
REST_S = 5.0
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "DISTLION_CREW_SECRET": "of this benchmark"}
STORE_PORT, MASTER_PORT = 29400, 29500
PROGRAM = Path(__file__).with_name("cost_worker.py")


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


class Pair:
    """Workers with a crew and workers without one, a process of each kind on each host.

    Args:
        lab: The hosts.
        processes: Which start and end them.
        listener: Of what they print.
        n_parameters: Of the network.
    """

    def __init__(
        self, lab: Lab, processes: HostProcesses, listener: Listener, n_parameters: int
    ) -> None:
        self._processes = processes
        address = lab.plan.address(0)
        placements = place_ranks(lab.n_hosts, 1)
        command = [sys.executable, "-m", "distlion", "crew", "--port", str(STORE_PORT)]
        keeper = replace(placements[0], rank=len(placements))
        processes.start(lab, keeper, command, {})
        while not listener.store_listens:  # workers do not wait for it
            processes.serve(timeout_s=1)
        self._calls: dict[str, list[Connection]] = {mode: [] for mode in MODES}
        for mode in MODES:
            for placement in placements:
                ours, theirs = Pipe()
                arguments = [str(theirs.fileno()), mode, str(n_parameters)]
                arguments += [f"{address}:{STORE_PORT}", str(lab.n_hosts)]
                processes.start(
                    lab,
                    placement,
                    [sys.executable, str(PROGRAM), *arguments],
                    placement.environment(address, MASTER_PORT) | QUIET,
                    pass_fds=[theirs.fileno()],
                )
                theirs.close()
                self._calls[mode].append(ours)
        first, _ = (self._collect(mode) for mode in MODES)
        self.n_parameters = first[0]

    def ask(self, mode: str, *call: Any) -> list[Any]:
        """Let all workers of a mode do something, and return what each found."""
        for connection in self._calls[mode]:
            connection.send(call)
        return self._collect(mode)

    def _collect(self, mode: str) -> list[Any]:
        answers = []
        for connection in self._calls[mode]:
            while not connection.poll(0.01):
                self._processes.serve(timeout_s=0)
            answers.append(connection.recv())
        return answers

    def time_steps(self, mode: str, steps: int) -> tuple[float, float]:
        """Return seconds of a training step, and of its optimizer, of the slowest worker."""
        found = self.ask(mode, "run", steps)
        whole_s, in_step_s = (max(column) / steps for column in zip(*found, strict=True))
        return whole_s, in_step_s

    def measure_rest(self) -> dict[str, float]:
        """Return the share of a core that a process of each mode takes while it does nothing."""
        before = {mode: self.ask(mode, "rest") for mode in MODES}
        time.sleep(REST_S)
        after = {mode: self.ask(mode, "rest") for mode in MODES}
        return {
            mode: statistics.mean(
                (late - early) / REST_S
                for early, late in zip(before[mode], after[mode], strict=True)
            )
            for mode in MODES
        }


def measure_cost(turns: int) -> dict[str, Any]:
    """Measure all numbers of workers, sizes and rates."""
    rows = []
    for n_workers in WORKERS:
        for n_parameters in PARAMETERS:
            listener = Listener()
            with Lab(n_workers) as lab, HostProcesses(listener) as processes:
                pair = Pair(lab, processes, listener, n_parameters)
                for rate in RATES:
                    lab.set_rates(rate)
                    rows.append({"workers": n_workers, "rate": rate, **_time_pair(pair, turns)})
                    sys.stderr.write(f"{n_workers} workers, {n_parameters:,}, {rate}\n")
                    sys.stderr.flush()
                rows[-1]["rest"] = pair.measure_rest()
    return {"rows": rows}


def _time_pair(pair: Pair, turns: int) -> dict[str, Any]:
    steps = {}
    for mode in MODES:
        pair.time_steps(mode, WARM_STEPS)
        steps[mode] = max(2, round(BLOCK_S / pair.time_steps(mode, WARM_STEPS)[0]))
    n_steps = min(steps.values())
    blocks: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for turn in range(turns):
        for mode in MODES if turn % 2 else MODES[::-1]:
            blocks[mode].append(pair.time_steps(mode, n_steps))
    ratios = [
        [with_s / without_s for with_s, without_s in zip(new, old, strict=True)]
        for new, old in zip(blocks["with"], blocks["without"], strict=True)
    ]
    return {
        "parameters": pair.n_parameters,
        "steps_of_a_block": n_steps,
        "turns": turns,
        "plain_s": statistics.median(whole_s for whole_s, _ in blocks["without"]),
        "crew_s": statistics.median(whole_s for whole_s, _ in blocks["with"]),
        "ratio": _describe([whole for whole, _ in ratios]),
        "step_ratio": _describe([in_step for _, in_step in ratios]),
        "blocks": blocks,
    }


def _describe(ratios: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return {"median": median, "lower": lower, "upper": upper}
