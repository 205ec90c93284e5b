"""Time steps with a crew beside steps without one, on the same hosts of the network lab."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, fields, replace
from itertools import permutations, product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from distlion_netlab import Lab
from distlion_netlab.launch import HostProcesses, place_ranks, show_line

WORKERS = (2, 4)
PARAMETERS = (1_000_000, 8_000_000)
RATES = ("unlimited", "1gbit")
MODES = ("without", "with", "control")
ORDERS = tuple(permutations(MODES))
SEGMENT_S, LEAST_STEPS = 0.8, 12
ROUNDS = 9
WARM_STEPS = 12
REST_S = 5.0
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "DISTLION_CREW_SECRET": "of this benchmark"}
STORE_PORT, MASTER_PORTS = 29400, {"without": 29500, "with": 29501, "control": 29502}
PROGRAM = Path(__file__).with_name("cost_worker.py")
RESAMPLINGS = 2_000


@dataclass(frozen=True)
class Segment:
    """Time of steps that the same processes did one after the other.

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
        mode: "with" for a crew; "without" and "control" for none.
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
                placement.environment(address, MASTER_PORTS[mode]) | QUIET,
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

    def warm_up(self) -> int:
        """Do some steps, and return how many a segment needs."""
        return max(LEAST_STEPS, round(SEGMENT_S / self.time_steps(WARM_STEPS).whole_s))

    def time_steps(self, steps: int) -> Segment:
        """Return what steps took; all workers end a step together, so that rank 0 speaks for all.

        A machine that others share makes many steps longer, and none shorter: a low one counts.
        """
        found = self.ask("run", steps)
        whole, alone, _ = found[0]
        cpu_s = sum(each[2] for each in found) / steps
        return Segment(_take_low(whole), _take_low(alone), cpu_s)

    def measure_rest(self) -> float:
        """Return the share of a core that a process takes while it does nothing."""
        before = self.ask("rest")
        time.sleep(REST_S)
        after = self.ask("rest")
        return statistics.mean(late - early for early, late in zip(before, after, strict=True)) / (
            REST_S
        )


def measure_cost(turns: int) -> dict[str, Any]:
    """Measure all numbers of workers, sizes and rates.

    Args:
        turns: How often all processes are started anew; a multiple of 6 has all orders alike.

    Returns:
        ``rows``, and ``conditions``: the hosts' congestion control.
    """
    rows, conditions = [], {}
    for n_workers, n_wanted in product(WORKERS, PARAMETERS):
        turns_of: dict[str, list[list[dict[str, Segment]]]] = {rate: [] for rate in RATES}
        rests = []
        for turn in range(turns):
            listener = Listener()
            with Lab(n_workers) as lab, HostProcesses(listener) as processes:
                conditions = {"tcp_congestion_control": lab.congestion_control}
                all_hosts = {
                    mode: Hosts(lab, processes, listener, n_wanted, mode)
                    for mode in ORDERS[turn % len(ORDERS)]  # those that start first are slower
                }
                for rate in RATES:
                    lab.set_rates(rate)
                    turns_of[rate].append(time_rounds(all_hosts, turn))
                rests.append(all_hosts["with"].measure_rest())
                n_parameters = all_hosts["with"].n_parameters
            sys.stderr.write(f"{n_workers} workers, {n_parameters:,}: turn {turn + 1}\n")
            sys.stderr.flush()
        for rate, found in turns_of.items():
            row = {"workers": n_workers, "parameters": n_parameters, "rate": rate, "turns": turns}
            rows.append(row | {"rest": statistics.median(rests)} | compare_modes(found))
    return {"conditions": conditions, "rows": rows}


def time_rounds(all_hosts: dict[str, Hosts], turn: int) -> list[dict[str, Segment]]:
    """Let the modes take turns; each begins and ends a round as often as the others.

    Args:
        all_hosts: The processes of each mode, which wait while others step.
        turn: Which order the first round has.
    """
    steps = min(hosts.warm_up() for hosts in all_hosts.values())
    rounds = []
    for number in range(ROUNDS):
        order = ORDERS[(turn * ROUNDS + number) % len(ORDERS)]
        rounds.append({mode: all_hosts[mode].time_steps(steps) for mode in order})
    return rounds


def compare_modes(turns: list[list[dict[str, Segment]]]) -> dict[str, Any]:
    """Return medians of modes, and of the ratios within a round medians and 95 % intervals.

    Args:
        turns: Of each turn its rounds.
    """
    rounds = [each for rounds in turns for each in rounds]
    row: dict[str, Any] = {}
    for field in fields(Segment):
        times = {
            mode: statistics.median(getattr(each[mode], field.name) for each in rounds)
            for mode in MODES
        }
        row[field.name] = times | {
            f"ratio_{mode}": find_ratio(
                [
                    [
                        getattr(each[mode], field.name) / getattr(each["without"], field.name)
                        for each in rounds
                    ]
                    for rounds in turns
                ]
            )
            for mode in MODES[1:]
        }
    return row


def find_ratio(turns: list[list[float]]) -> dict[str, float]:
    """Return the median of ratios and its 95 % interval.

    The interval is that of a bootstrap over turns and, within them, over rounds: what lasts as long
    as a process, as its place in memory, makes the rounds of a turn alike.

    Args:
        turns: Of each turn the ratios of its rounds.
    """
    random = np.random.default_rng(0)
    medians = []
    for _ in range(RESAMPLINGS):
        drawn = random.choice(len(turns), size=len(turns))
        values = [random.choice(turns[turn], size=len(turns[turn])) for turn in drawn]
        medians.append(np.median(np.concatenate(values)))
    lower, upper = np.quantile(medians, (0.025, 0.975))
    median = statistics.median(ratio for turn in turns for ratio in turn)
    return {"median": median, "lower": float(lower), "upper": float(upper)}


def _take_low(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4)[0]
