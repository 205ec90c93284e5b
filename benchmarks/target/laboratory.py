"""Seconds from the network lab: steps of all methods in turns, and whole runs."""

from __future__ import annotations

import datetime as dt
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import study_path  # noqa: F401
from archive import Records
from cells import choose_rate
from host import Job
from settings import HOSTS, make_cell

from distlion_lab.errors import WorkerFailedError
from distlion_netlab import Lab, run_command
from distlion_netlab.sweep import read_lab_conditions

_HOST = Path(__file__).with_name("host.py")


def run_job(job: Job, link: str) -> dict[str, Any]:
    """Do a job on hosts whose links have a rate; return what rank 0 found.

    Raises:
        WorkerFailedError: A worker died.
    """
    found = run_on_hosts(_HOST, json.dumps(asdict(job)), Path(job.out), hosts=HOSTS, link=link)
    return {"task": job.task, **found}


def run_on_hosts(program: Path, job: str, out: Path, *, hosts: int, link: str) -> dict[str, Any]:
    """Run a program on hosts whose links have a rate; return what rank 0 found.

    Args:
        program: Its file.
        job: Its argument.
        out: The file that rank 0 writes.
        hosts: Their number.
        link: Its rate.

    Raises:
        WorkerFailedError: A worker died.
    """
    with Lab(hosts, link) as lab:
        conditions = read_lab_conditions(lab)
        status = run_command(lab, [sys.executable, str(program), job])
    if status:
        raise WorkerFailedError(f"a worker ended with status {status}; see above")
    found: dict[str, Any] = json.loads(out.read_text())
    return {"link": link, "hosts": hosts, "conditions": conditions, **found}


def time_steps(task: str, folder: Path, link: str, *, repetitions: int) -> dict[str, Any]:
    """Time steps of every method on a task."""
    with tempfile.TemporaryDirectory() as place:
        out = str(Path(place) / "found.json")
        job = Job(task=task, folder=str(folder), out=out, repetitions=repetitions)
        return run_job(job, link)


def train_whole(
    records: Records, task: str, folder: Path, link: str, *, method: str, seed: int
) -> dict[str, Any]:
    """Train a method in the lab, at the rate that was chosen for it."""
    rate = choose_rate(make_cell(task, method), records.read).rate
    if rate is None:
        sys.exit(f"no rate has been chosen yet for {method} on {task}")
    with tempfile.TemporaryDirectory() as place:
        out = str(Path(place) / "found.json")
        job = Job(task=task, folder=str(folder), out=out, method=method, lr=rate, seed=seed)
        return run_job(job, link)


def save(path: Path, found: dict[str, Any]) -> None:
    """Write a record, a field a line."""
    found = {"date": dt.date.today().isoformat(), **found}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
