"""Traces of a bucket on hosts of a network lab, by distlion of one commit or several."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bucket_parts import INSTANTS

from distlion_netlab.lab import Lab
from distlion_netlab.launch import run_command
from distlion_netlab.sweep import read_lab_conditions

HOST = Path(__file__).with_name("bucket_host.py")
Record = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A distlion, and the transport of its votes.

    Attributes:
        wire: As in ``DISTLION_WIRE``; a commit before own sockets has Gloo alone.
        python: The Python in whose environment it is.
    """

    wire: str
    python: str = sys.executable

    def find_commit(self) -> str | None:
        """Return the commit and its date; None if it is not in a checkout."""
        code = "import distlion, pathlib; print(pathlib.Path(distlion.__file__).parent)"
        where = _ask([self.python, "-c", code])
        said = _ask(["git", "-C", *where, "log", "-1", "--format=%h of %cs"]) if where else []
        return said[0] if said else None


TODAY = {"gloo": Variant("gloo"), "tcp": Variant("tcp")}


@dataclass(frozen=True)
class Place:
    """The hosts and links of a trace.

    Attributes:
        hosts: Number of hosts, each with one rank.
        rate: Rate of their links, in the format of ``Lab``.
        latency_s: Seconds from one host to another.
        device: Device of the parameters, for all ranks.
    """

    hosts: int
    rate: str = "1gbit"
    latency_s: float = 0.0
    device: str = "cpu"


def trace_bucket(
    place: Place,
    n_elements: int,
    *,
    steps: int = 11,
    turns: int = 3,
    variants: Mapping[str, Variant] = TODAY,
) -> Record:
    """Trace steps with one bucket, with variants in turn; processes are new in each turn.

    Args:
        place: The hosts.
        n_elements: Number of parameters.
        steps: Steps of a variant in a turn.
        turns: Number of turns.
        variants: What to compare.

    Returns:
        The place, conditions, bytes of a chunk of votes and of replies, and for each variant its
        ``steps``: ``INSTANTS`` of each rank in microseconds since the first rank began.

    Raises:
        RuntimeError: A worker failed.
    """
    found: Record = {"place": vars(place) | {"n_elements": n_elements}, "steps": {}}
    with Lab(place.hosts, place.rate, latency_s=place.latency_s) as lab:
        found["conditions"] = read_lab_conditions(lab)
        for _ in range(turns):
            for name, variant in variants.items():
                ranks = _run_hosts(lab, variant, n_elements, steps, place.device)
                mine = found["steps"].setdefault(name, [])
                mine += map(_shift, zip(*(rank["steps"] for rank in ranks), strict=True))
                found |= {key: ranks[0][key] for key in ("vote_bytes", "reply_bytes")}
    return found


def _run_hosts(
    lab: Lab, variant: Variant, n_elements: int, steps: int, device: str
) -> list[Record]:
    """Run a process on each host, and return what they found, in the order of ranks."""
    with TemporaryDirectory() as folder:
        command = [variant.python, str(HOST), folder, str(n_elements), str(steps), device]
        status = run_command(lab, command, environment={"DISTLION_WIRE": variant.wire})
        if status:
            raise RuntimeError(f"a worker of the trace ended with status {status}; see above")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(lab.n_hosts)]


def _shift(step: tuple[list[int], ...]) -> list[list[float]]:
    """Return a step's instants in microseconds since its first rank began."""
    assert all(len(instants) == len(INSTANTS) for instants in step)
    first_ns = min(instants[0] for instants in step)
    return [[round((at_ns - first_ns) / 1e3, 1) for at_ns in instants] for instants in step]


def _ask(command: list[str]) -> list[str]:
    """Return what a command says, by lines; nothing if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if ended.returncode else ended.stdout.splitlines()
