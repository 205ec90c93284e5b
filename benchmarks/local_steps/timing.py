"""Seconds from the network lab: computing and exchanges in turns, and whole runs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import target_path  # noqa: F401
from archive import Records
from arrivals import read_seconds
from cells import choose_rate
from contest import WORKERS, ContestCell, lengthen, make_cell, make_local_cell, read_local
from curves import Data
from lab_host import Job
from laboratory import save
from runs import RunConfig

from distlion_lab.errors import WorkerFailedError
from distlion_netlab import Lab, run_command
from distlion_netlab.link_rate import UNLIMITED
from distlion_netlab.sweep import read_lab_conditions

LOAD = "load_average_before"
BY_LINK = ("conditions", "seconds", "cpu_seconds")
"""Fields of a record of seconds that have an entry for each link."""
_HOST = Path(__file__).with_name("lab_host.py")
_POLL_S = 0.1


@contextmanager
def _changing_rates(lab: Lab, place: Path) -> Iterator[None]:
    """Set the rate that the hosts ask for in a file, until the block ends."""
    ended = threading.Event()

    def serve() -> None:
        current = ""
        while not ended.wait(_POLL_S):
            wanted = place / "wanted"
            rate = wanted.read_text() if wanted.exists() else ""
            if rate != current:
                lab.set_rates(rate)
                (place / "set").write_text(rate)
                current = rate

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_job(job: Job) -> dict[str, Any]:
    """Do a job on hosts whose links are not limited before it asks; return what rank 0 found.

    Raises:
        WorkerFailedError: A worker died.
    """
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        job = replace(job, out=str(out), place=folder)
        command = [sys.executable, str(_HOST), json.dumps(asdict(job))]
        with Lab(WORKERS, UNLIMITED) as lab, _changing_rates(lab, Path(folder)):
            conditions = {**read_lab_conditions(lab), LOAD: load}
            status = run_command(lab, command)
        if status:
            raise WorkerFailedError(f"a worker ended with status {status}; see above")
        found: dict[str, Any] = json.loads(out.read_text())
    return {"task": job.task, "hosts": WORKERS, "conditions": conditions, **found}


def time_all(folder: Path, data: Data, links: Sequence[str], repetitions: int) -> None:
    """Time computing and exchanges of each task; what is timed on a link is saved at once.

    The record of a task keeps links that were timed before.
    """
    for task in data.tasks:
        where = str(data.folder(task).resolve())
        for link in links:
            job = Job(task=task, folder=where, out="", links=(link,), repetitions=repetitions)
            found = run_job(job)
            found["conditions"] = {link: found["conditions"]}
            before = read_seconds(folder, task) or {}
            for key in BY_LINK:
                found[key] = {**before.get(key, {}), **found[key]}
            save(folder / f"seconds_{task}.json", found)


def train_whole(
    records: Records, data: Data, method: str, *, link: str, seed: int, is_long: bool
) -> None:
    """Train a method on text in the lab, at the rate that was chosen for it."""
    config = configure_whole(records, method, seed=seed, is_long=is_long)
    where = str(data.folder("text").resolve())
    found = run_job(Job(task="text", folder=where, out="", links=(link,), run=asdict(config)))
    length = "_long" if is_long else ""
    name = f"whole_{config.method}{length}_{link}_s{seed}.json"
    save(records.folder / name, {"link": link, **found})


def configure_whole(records: Records, method: str, *, seed: int, is_long: bool) -> RunConfig:
    """Return a whole run of a method on text, at the rate that was chosen for it.

    Args:
        records: Of the tuning.
        method: Its name.
        seed: Of the run.
        is_long: Whether it is longer than DDP's.

    Raises:
        SystemExit: No rate has been chosen yet, or the name has another one.
    """
    cell = _find_cell(records, method)
    rate = choose_rate(cell, records.read).rate
    if rate is None:
        sys.exit(f"no rate has been chosen yet for {method}")
    cell = lengthen(cell) if is_long else cell
    config = replace(cell.config(rate, seed, is_tuning=False), workers=WORKERS)
    if method not in (cell.method, config.method):
        sys.exit(f"the rate of {method} was not chosen: expected {config.method}")
    return config


def _find_cell(records: Records, method: str) -> ContestCell:
    local = read_local(method)
    if local is None:
        return make_cell("text", method)
    cell = make_local_cell("text", local.kind, records.read, local.every)
    if cell is None:
        sys.exit(f"no inner rate has been chosen yet for {method}")
    return cell
