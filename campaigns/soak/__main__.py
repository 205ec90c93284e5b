"""Train on hosts of the network lab while they are killed, stopped and cut off, again and again.

    make soak MINUTES=30         or    python campaigns/soak [--minutes 1] [--workers 3] [--seed 0]

In each round all workers start from the latest checkpoint, which must be the last that was saved.
After a number of steps that the seed draws, one of them is killed, stopped, or loses its link. All
others must end by themselves, in time; a stopped one must end too once it wakes. When the time is
over, a last round goes on without a fault, and its replicas, parameters and momenta must be those
of a run that was never disturbed.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from distlion_netlab import Lab
from distlion_netlab.launch import HostProcesses, place_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))

from worker import SAVE_EVERY, STEP_TIMEOUT_S

Fault = Literal["kill", "stop", "link down"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
NEVER = 1_000_000_000
FIRST_PORT = 29500
# Interpreters import torch, and the machine may be busy.
START_LIMIT_S = 120.0
# Beyond the timeout of a step: to name the culprit, and to end the interpreter.
END_LIMIT_S = STEP_TIMEOUT_S + 20.0


class SoakError(Exception):
    """Something that must not happen did; the seed and round repeat it."""


@dataclass
class Round:
    """One launch of all workers.

    Attributes:
        fault: What happened to one of them; None for nothing.
        victim: To whom.
        resumed_at: The step from which they went on.
        reached: The last step that any of them reported.
        seconds: From the fault until the last of the others had ended.
        digests: What each rank ended with, if it came to the last step.
    """

    fault: Fault | None
    victim: int
    resumed_at: int = -1
    reached: int = -1
    seconds: float = 0.0
    digests: dict[int, str] | None = None


class Launch:
    """The workers of one round, and what they report.

    Args:
        lab: Where they run.
        folder: Of the checkpoints.
        last_step: When to end.
        port: Of the rendezvous.
    """

    def __init__(self, lab: Lab, folder: Path, last_step: int, port: int) -> None:
        self._lab = lab
        self.steps: dict[int, int] = {}
        self.resumed: dict[int, int] = {}
        self.digests: dict[int, str] = {}
        self.said: list[str] = []
        self.processes = HostProcesses(self._hear)
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        for placement in place_ranks(lab.n_hosts, 1):
            variables = placement.environment(lab.plan.address(0), port)
            self.processes.start(lab, placement, [*command, str(folder), str(last_step)], variables)

    def _hear(self, rank: int, is_error: bool, line: bytes) -> None:
        words = line.decode(errors="replace").split()
        if is_error or not words:
            self.said.append(f"[{rank}] {line.decode(errors='replace')}")
        elif words[0] == "resumed":
            self.resumed[rank] = int(words[1])
        elif words[0] == "step":
            self.steps[rank] = int(words[1])
        elif words[0] == "digest":
            self.digests[rank] = " ".join(words[1:])

    def serve_until(self, is_over: object, limit_s: float, what: str) -> None:
        """Hear the workers until something is so; the watchdog of the soak."""
        assert callable(is_over)
        deadline = time.monotonic() + limit_s
        while not is_over():
            left = deadline - time.monotonic()
            if left <= 0 or (not self.processes.running and not is_over()):
                tail = "\n".join(self.said[-30:])
                raise SoakError(f"{what}: not within {limit_s:g} s; workers said:\n{tail}")
            self.processes.serve(timeout_s=left)


def check_resumed(resumed: dict[int, int], reached: int) -> None:
    """Check that all go on from the last checkpoint of those who came to a step, or a newer one."""
    saved = reached // SAVE_EVERY * SAVE_EVERY
    if len(set(resumed.values())) > 1 or min(resumed.values()) < saved:
        raise SoakError(f"resumed from {resumed}, and step {saved} was saved before")


def play_round(
    lab: Lab, folder: Path, port: int, chance: random.Random, *, reached: int = 0
) -> Round:
    """Start all workers, strike one of them, and see all others end.

    Args:
        lab: Where they run.
        folder: Of the checkpoints.
        port: Of the rendezvous.
        chance: Draws the fault.
        reached: To which step the round before came.
    """
    found = Round(chance.choice(FAULTS), chance.randrange(lab.n_hosts))
    after = chance.randrange(1, 3 * SAVE_EVERY)
    launch = Launch(lab, folder, NEVER, port)
    with launch.processes as processes:
        launch.serve_until(
            lambda: len(launch.resumed) == lab.n_hosts, START_LIMIT_S, "all workers have started"
        )
        check_resumed(launch.resumed, reached)
        found.resumed_at = launch.resumed[0]
        goal = found.resumed_at + after
        launch.serve_until(
            lambda: launch.steps.get(found.victim, 0) >= goal, START_LIMIT_S, f"step {goal}"
        )
        struck = time.monotonic()
        others = set(range(lab.n_hosts)) - {found.victim}
        if found.fault == "link down":
            lab.set_link(found.victim, up=False)
            others.add(found.victim)  # it runs, and must give up too
        else:
            number = signal.SIGKILL if found.fault == "kill" else signal.SIGSTOP
            processes.send_signal(found.victim, number)
        launch.serve_until(
            lambda: not others & set(processes.running), END_LIMIT_S, f"all end after {found.fault}"
        )
        found.seconds = time.monotonic() - struck
        if found.fault == "stop":
            processes.send_signal(found.victim, signal.SIGCONT)
            launch.serve_until(
                lambda: not processes.running, END_LIMIT_S, "the one that woke up ends"
            )
        if found.fault == "link down":
            lab.set_link(found.victim, up=True)
    found.reached = max(launch.steps.values(), default=found.resumed_at)
    behind = found.reached - min(launch.steps.get(rank, 0) for rank in range(lab.n_hosts))
    if behind > 1:
        raise SoakError(f"workers stood {behind} steps apart: {launch.steps}")
    return found


def finish(lab: Lab, folder: Path, last_step: int, port: int) -> dict[int, str]:
    """Train to the last step without a fault, and return what each rank ends with."""
    launch = Launch(lab, folder, last_step, port)
    with launch.processes as processes:
        # A watchdog for each step rather than for all of them, of which there may be many.
        while processes.running:
            seen = dict(launch.steps)
            launch.serve_until(
                lambda seen=seen: launch.steps != seen or not processes.running,
                START_LIMIT_S,
                "another step",
            )
    if len(launch.digests) != lab.n_hosts:
        raise SoakError("the last round failed:\n" + "\n".join(launch.said[-30:]))
    if len({digest.split()[0] for digest in launch.digests.values()}) > 1:
        raise SoakError(f"replicas differ: {launch.digests}")
    return launch.digests


def soak(minutes: float, workers: int, seed: int) -> list[Round]:
    chance, rounds, port = random.Random(seed), [], FIRST_PORT
    with tempfile.TemporaryDirectory() as temporary, Lab(workers) as lab:
        folder, end = Path(temporary) / "soaked", time.monotonic() + 60 * minutes
        # However slow the machine is, until a round has begun with a checkpoint.
        while time.monotonic() < end or not any(found.resumed_at for found in rounds):
            reached = rounds[-1].reached if rounds else 0
            found = play_round(lab, folder, port, chance, reached=reached)
            rounds.append(found)
            port += 1
            print(
                f"round {len(rounds):3}: from step {found.resumed_at:5}, {found.fault} of rank "
                f"{found.victim} at step {found.reached:5}; others ended in {found.seconds:.1f} s",
                flush=True,
            )
        last_step = max(found.reached for found in rounds) + SAVE_EVERY
        digests = finish(lab, folder, last_step, port)
        print(f"last round: to step {last_step}, replicas equal", flush=True)
        undisturbed = finish(lab, Path(temporary) / "undisturbed", last_step, port + 1)
    if digests != undisturbed:
        raise SoakError(f"ended with {digests}, an undisturbed run with {undisturbed}")
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        rounds = soak(arguments.minutes, arguments.workers, arguments.seed)
    except SoakError as error:
        print(f"FAILED (--seed {arguments.seed}): {error}", file=sys.stderr)
        return 1
    seconds = [found.seconds for found in rounds]
    kinds = Counter(str(found.fault) for found in rounds)
    print(
        f"{len(rounds)} faults ({', '.join(f'{n} x {kind}' for kind, n in sorted(kinds.items()))})"
        f"; others ended after {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s "
        "(most); parameters and momenta of all workers are bitwise identical to those of an "
        "undisturbed run"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
