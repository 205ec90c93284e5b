"""The labs that exist: one small file for each, so that a later process can find and remove it."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from distlion.errors import DistlionError
from distlion_lab.errors import NetlabError
from distlion_lab.json_file import fields, number, optional, read_json, text, whole
from distlion_netlab.lab_plan import LabPlan

# Emptied at boot, like the namespaces.
STATE_FOLDER = Path("/run/distlion-netlab")
_STATE = fields(
    name=text,
    n_hosts=whole,
    owner_pid=optional(whole),
    owner_start=optional(whole),
)


@dataclass(frozen=True)
class LabState:
    """The content of a lab's file.

    Attributes:
        name: Name of the lab.
        n_hosts: Number of hosts.
        owner_pid: Process that the lab must not outlive; None if it stays until it is removed.
        owner_start: Start of that process, in ticks since boot: process numbers are reused.
        latency_s: Seconds that a frame takes from one host to another.
    """

    name: str
    n_hosts: int
    owner_pid: int | None
    owner_start: int | None
    latency_s: float = 0.0

    @classmethod
    def of(cls, plan: LabPlan, *, stays: bool, latency_s: float = 0.0) -> LabState:
        """Describe a lab; this process owns it unless it ``stays``."""
        if stays:
            return cls(plan.name, plan.n_hosts, None, None, latency_s)
        return cls(plan.name, plan.n_hosts, os.getpid(), _start_of(os.getpid()), latency_s)

    @property
    def plan(self) -> LabPlan:
        """The names that belong to the lab."""
        return LabPlan(self.name, self.n_hosts)

    @property
    def is_abandoned(self) -> bool:
        """True if the lab has outlived its owner."""
        return self.owner_pid is not None and _start_of(self.owner_pid) != self.owner_start

    def check_free(self) -> None:
        """Check that no lab has this name.

        Raises:
            NetlabError: One has, or a file that describes no lab has its place.
        """
        path = _path(self.name)
        if self.name in {state.name for state in list_states()}:
            raise NetlabError(
                f"there is a lab named {self.name!r}; choose another name, or remove it with "
                f"distlion netlab down --name {self.name}"
            )
        if os.path.lexists(path):
            raise NetlabError(
                f"{path} describes no lab of this version; choose another name, or remove this file"
            )

    def claim(self) -> None:
        """Write the file.

        Raises:
            NetlabError: There is a lab of this name, or the file cannot be written.
        """
        path = _path(self.name)
        try:
            path.parent.mkdir(mode=0o755, exist_ok=True)
            # The file appears with all of its content: a part of it would describe no lab.
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
                json.dump(asdict(self), file)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.link(file.name, path)
        except FileExistsError:
            self.check_free()
            raise NetlabError(f"a lab named {self.name!r} was just there; try again") from None
        except OSError as error:
            raise NetlabError(f"{path} cannot be written: {error.strerror}") from error

    def forget(self) -> None:
        """Remove the file, if it is there."""
        _path(self.name).unlink(missing_ok=True)


def read_state(name: str) -> LabState:
    """Read the file of a lab.

    Raises:
        NetlabError: There is no such lab.
    """
    states = {state.name: state for state in list_states()}
    if name not in states:
        known = ", ".join(sorted(states)) or "none"
        raise NetlabError(f"there is no lab named {name!r}; labs on this machine: {known}")
    return states[name]


def list_states() -> list[LabState]:
    """List all labs on this machine by name; other files are skipped."""
    states = []
    for path in sorted(STATE_FOLDER.glob("*.json")):
        try:
            content = read_json(path)
            _STATE(content, path.name)
            number(content.get("latency_s", 0.0), path.name)
            state = LabState(**content)
            if state.plan.name == path.stem:
                states.append(state)
        except (TypeError, DistlionError):
            continue
    return states


def _path(name: str) -> Path:
    return STATE_FOLDER / f"{name}.json"


def _start_of(pid: int) -> int | None:
    """Return the start of a process in ticks since boot, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Field 22 of proc(5); the first one after the name is field 3.
    return None if fields[0] in "ZX" else int(fields[19])
