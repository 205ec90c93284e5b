"""Kill a random rank of three at a random moment, again and again, and see how the others end.

    python benchmarks/random_kills.py [--kills 50] [--seed 0] [--json] [--results FOLDER]

Every launch is a training run of its own: three processes on this machine, a fourth that keeps the
rendezvous store as torchrun does, a pattern and overlap drawn at random. A survivor ends cleanly if
its interpreter ends by itself with an uncaught PeerLostError and exit status 1, and its parameters
and momenta are those after its last committed step. Prints a summary, or JSON with --json; with
--results also writes random_kills.json and random_kills.md into FOLDER.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import hashlib
import json
import os
import platform
import random
import select
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, and takes a second
import torch.distributed as dist

import distlion
from distlion.errors import StepError
from distlion.wire import PATTERNS

RANKS = 3
SHAPES = ((256, 256), (1000,), (256, 400), (7,), (400, 64))
# A kill comes after the first steps, at a moment drawn from this much time.
WARM_STEPS = 3
WINDOW_S = 0.3
END_LIMIT_S = 20.0
OVERLAP = ", overlap"
SETTINGS = (*PATTERNS, "all-reduce" + OVERLAP)


@dataclass(frozen=True)
class Survivor:
    """How a rank came out.

    Attributes:
        rank: Its rank.
        status: Exit status of its process.
        seconds: From the kill to the error; None without one.
        error: Class of the error.
        culprits: Ranks that it named.
        committed_step: Steps committed, as the error says.
        state_is_right: Whether parameters and momenta were those after that step.
        params: Digest of the parameters.
    """

    rank: int
    status: int
    seconds: float | None = None
    error: str = ""
    culprits: tuple[int, ...] = ()
    committed_step: int = -1
    state_is_right: bool = False
    params: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether it ended as guaranteed."""
        return self.status == 1 and self.error == "PeerLostError" and self.state_is_right


@dataclass(frozen=True)
class Kill:
    """One launch.

    Attributes:
        victim: Who was killed.
        setting: Pattern and overlap.
        delay_s: After the first steps.
        survivors: The others.
    """

    victim: int
    setting: str
    delay_s: float
    survivors: tuple[Survivor, ...]

    @property
    def is_clean(self) -> bool:
        """Whether all survivors ended as guaranteed, with equal replicas where steps are equal."""
        first, second = self.survivors
        agree = first.committed_step != second.committed_step or first.params == second.params
        return first.is_clean and second.is_clean and agree

    @property
    def steps_apart(self) -> int:
        """Between the survivors."""
        first, second = (survivor.committed_step for survivor in self.survivors)
        return abs(first - second)

    @property
    def is_named_right(self) -> bool:
        """Whether all survivors named the victim and nobody else."""
        return all(survivor.culprits == (self.victim,) for survivor in self.survivors)


def make_optimizer(setting: str) -> distlion.DistributedLion:
    return distlion.DistributedLion(
        [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES],
        lr=1e-3,
        exchange=PATTERNS[setting.removesuffix(OVERLAP)],
        overlap=setting.endswith(OVERLAP),
        bucket_elements=40_000,
    )


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def train(rank: int, port: int, setting: str, pipe: int) -> None:
    """Train forever as one rank; the error that ends it goes through the pipe, and is raised."""
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    optimizer = make_optimizer(setting)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    momenta = [optimizer.state[p]["exp_avg"] for p in params]
    chance = torch.Generator().manual_seed(rank)
    states = {0: digest(params + momenta)}
    try:
        while True:
            optimizer.zero_grad()
            terms = [(p * torch.randn(p.shape, generator=chance)).sum() for p in params]
            sum(terms[1:], terms[0]).backward()
            optimizer.step()
            step = optimizer.committed_step
            states = {step - 1: states[step - 1], step: digest(params + momenta)}
            if step == WARM_STEPS:
                os.write(pipe, b"ready\n")
    except StepError as error:
        report = {
            "failed_s": time.monotonic(),
            "error": type(error).__name__,
            "culprits": error.culprits,
            "committed_step": error.committed_step,
            "state_is_right": digest(params + momenta) == states.get(error.committed_step or 0),
            "params": digest(params),
        }
        os.write(pipe, json.dumps(report).encode() + b"\n")
        raise


def keep_store(pipe: int, end: int) -> None:
    """Keep the rendezvous store until the other end of ``end`` is closed."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    os.read(end, 1)


class Child:
    """A fork of this process, which has imported torch, and the pipe that it writes into."""

    def __init__(self, log: Path) -> None:
        self.reader, self.writer = os.pipe()
        self.pid = os.fork()
        if self.is_here:
            os.close(self.reader)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            return
        os.close(self.writer)
        self._lines = os.fdopen(self.reader)
        self._pidfd = os.pidfd_open(self.pid)

    @property
    def is_here(self) -> bool:
        """Whether this process is the child."""
        return self.pid == 0

    def read_line(self) -> str:
        """Read a line; empty if the child has ended."""
        ready, _, _ = select.select([self.reader], [], [], END_LIMIT_S)
        return self._lines.readline() if ready else ""

    def wait(self) -> int:
        """Return the exit status; a child that does not end is killed, and has -9."""
        if not select.select([self._pidfd], [], [], END_LIMIT_S)[0]:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._pidfd)
        self._lines.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def kill_once(chance: random.Random, folder: Path) -> Kill | None:
    """Launch, kill, and look; None in a child whose part is over."""
    victim, setting = chance.randrange(RANKS), chance.choice(SETTINGS)
    delay_s = chance.uniform(0.0, WINDOW_S)
    end_reader, end_writer = os.pipe()
    keeper = Child(folder / "store")
    if keeper.is_here:
        os.close(end_writer)
        keep_store(keeper.writer, end_reader)
        return None
    os.close(end_reader)
    port = int(keeper.read_line())
    ranks = []
    for rank in range(RANKS):
        child = Child(folder / f"rank{rank}")
        if child.is_here:
            os.close(end_writer)
            train(rank, port, setting, child.writer)
            return None
        ranks.append(child)
    for child in ranks:
        child.read_line()
    time.sleep(delay_s)
    killed_s = time.monotonic()
    os.kill(ranks[victim].pid, signal.SIGKILL)
    survivors = []
    for rank, child in enumerate(ranks):
        line = "" if rank == victim else child.read_line()
        status = child.wait()
        if rank == victim:
            continue
        found = json.loads(line) if line else {"failed_s": None}
        failed_s = found.pop("failed_s")
        found["culprits"] = tuple(found.get("culprits", ()))
        seconds = None if failed_s is None else failed_s - killed_s
        survivors.append(Survivor(rank, status, seconds, **found))
    os.close(end_writer)
    keeper.wait()
    return Kill(victim, setting, delay_s, tuple(survivors))


def summarize(kills: list[Kill]) -> dict[str, Any]:
    seconds = [s.seconds for kill in kills for s in kill.survivors if s.seconds is not None]
    return {
        "kills": len(kills),
        "clean_ends": sum(kill.is_clean for kill in kills),
        "victim_named_by_all": sum(kill.is_named_right for kill in kills),
        "steps_apart": dict(sorted(Counter(kill.steps_apart for kill in kills).items())),
        "seconds_to_the_error": {
            "median": round(statistics.median(seconds), 3) if seconds else None,
            "largest": round(max(seconds), 3) if seconds else None,
        },
        "victims": dict(sorted(Counter(kill.victim for kill in kills).items())),
        "settings": dict(sorted(Counter(kill.setting for kill in kills).items())),
    }


def read_conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/random_kills.py --kills {args.kills} --seed {args.seed}",
        "ranks": RANKS,
        "parameters": sum(torch.Size(shape).numel() for shape in SHAPES),
        "moment_of_the_kill": f"0 to {WINDOW_S} s after step {WARM_STEPS}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def write_markdown(result: dict[str, Any]) -> str:
    found = result["summary"]
    apart = ", ".join(f"{n} launches {steps} apart" for steps, n in found["steps_apart"].items())
    seconds = found["seconds_to_the_error"]
    rows = [
        ("survivors ended cleanly", f"{found['clean_ends']} of {found['kills']} launches"),
        ("all survivors named the victim", f"{found['victim_named_by_all']} of {found['kills']}"),
        ("committed steps of the survivors", apart),
        (
            "from the kill to the error",
            f"median {seconds['median']} s, at most {seconds['largest']} s",
        ),
        ("victims", ", ".join(f"rank {r}: {n}" for r, n in found["victims"].items())),
        ("settings", ", ".join(f"{name}: {n}" for name, n in found["settings"].items())),
    ]
    return "\n".join(
        [
            "# Random kills",
            "",
            "Made by `python benchmarks/random_kills.py` from `random_kills.json`.",
            "",
            *(f"- {name.replace('_', ' ')}: {v}" for name, v in result["conditions"].items()),
            "",
            "|  |  |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "A clean end: the interpreter ends by itself with an uncaught PeerLostError and exit",
            "status 1; parameters and momenta are those after the last committed step, and",
            "survivors with equally many steps have equal parameters.",
            "",
        ]
    )


def main() -> int | None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--results", type=Path, help="folder of random_kills.json and .md")
    args = parser.parse_args()
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # else every interpreter that ends would copy the pages of all that was imported
    chance = random.Random(args.seed)
    kills: list[Kill] = []
    for number in range(args.kills):
        folder = Path(tempfile.mkdtemp(prefix="distlion-kills-"))
        kill = kill_once(chance, folder)
        if kill is None:
            return None
        kills.append(kill)
        how = f"rank {kill.victim} ({kill.setting})"
        said = "clean" if kill.is_clean else f"NOT CLEAN, see {folder}"
        named = "" if kill.is_named_right else ", victim not named"
        line = f"{number + 1}/{args.kills} {how}: {said}, {kill.steps_apart} apart{named}\n"
        sys.stderr.write(line)
        if kill.is_clean:
            for log in folder.iterdir():
                log.unlink()
            folder.rmdir()
    result = {
        "conditions": read_conditions(args),
        "summary": summarize(kills),
        "kills": [asdict(kill) for kill in kills],
    }
    if args.results is not None:
        file = args.results / "random_kills.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text(write_markdown(json.loads(file.read_text())))
    print(json.dumps(result) if args.json else write_markdown(json.loads(json.dumps(result))))
    return 0 if all(kill.is_clean for kill in kills) else 1


if __name__ == "__main__":
    sys.exit(main())
