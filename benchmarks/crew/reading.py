"""Read the logs of a soak: what each event cost, what was lost, and what grew."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SETTLED_STEPS = 60
"""Steps of a worker before what it holds is read for the first time."""
RESOURCES = ("rss_kib", "fds", "threads")


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Attributes:
        worker: Number of the worker.
        life: Which of its processes.
        kind: "ready", "step" or "failed".
        time_s: When it was written.
        step, epoch, digest: Of a committed step.
        held: Memory, file descriptors and threads, where they were read.
    """

    worker: int
    life: int
    kind: str
    time_s: float
    step: int = -1
    epoch: int = -1
    digest: int = 0
    held: tuple[int, ...] = ()


def read_logs(folder: Path) -> list[Line]:
    """Return the lines of all logs in a folder, in order of time."""
    found = []
    for file in sorted(folder.glob("worker-*.jsonl")):
        worker, life = map(int, file.stem.removeprefix("worker-").split("."))
        text = file.read_text()
        whole = text[: text.rfind("\n") + 1]  # a kill may have cut off the last line
        found += [read_line(worker, life, json.loads(line)) for line in whole.splitlines()]
    return sorted(found, key=lambda line: line.time_s)


def read_line(worker: int, life: int, fields: dict[str, Any]) -> Line:
    """Return a line, of which a log holds the fields."""
    held = tuple(fields[name] for name in RESOURCES if name in fields)
    rest = {name: value for name, value in fields.items() if name not in RESOURCES}
    return Line(worker, life, **rest, held=held)


def list_commits(lines: Iterable[Line], *, without: int = -1) -> list[Line]:
    """Return the first line of each step of each epoch, but for those of a worker."""
    seen: set[tuple[int, int]] = set()
    found = []
    for line in lines:
        place = line.epoch, line.step
        if line.kind == "step" and line.worker != without and place not in seen:
            seen.add(place)
            found.append(line)
    return found


def find_forks(lines: Iterable[Line]) -> list[tuple[int, int]]:
    """Return each epoch and step in which two workers had different parameters."""
    digests = defaultdict(set)
    for line in lines:
        if line.kind == "step":
            digests[line.epoch, line.step].add(line.digest)
    return [place for place, found in digests.items() if len(found) > 1]


def count_repeated(lines: Iterable[Line]) -> int:
    """Return how many committed steps were taken back: steps committed again in a later epoch."""
    epochs = defaultdict(set)
    for line in lines:
        if line.kind == "step":
            epochs[line.step].add(line.epoch)
    return sum(len(found) - 1 for found in epochs.values())


def find_pause(commits: list[Line], begin_s: float, end_s: float) -> float:
    """Return the longest time without a commit between two moments."""
    between = [line.time_s for line in commits if begin_s < line.time_s < end_s]
    edges = [begin_s, *between, end_s]
    return max(after - before for before, after in pairwise(edges))


def find_next_epoch(commits: list[Line], moment_s: float) -> float | None:
    """Return seconds from a moment to the first step committed in a later epoch than then."""
    epoch = max((line.epoch for line in commits if line.time_s <= moment_s), default=-1)
    later = (line.time_s for line in commits if line.time_s > moment_s and line.epoch > epoch)
    found = min(later, default=None)
    return None if found is None else found - moment_s


def measure_events(lines: list[Line], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events, each with what it cost.

    A kill: seconds to the next step without the victim. A stop: the longest pause of the others
    until it woke, and the seconds from its waking to its next step. A join: the longest pause of
    the others, the time between their last step without the newcomer and their first one with it,
    and the seconds from its start, and from its readiness, to its first step. Pauses are looked for
    until the next event for which the harness waited; an event is alone if all trained together
    before it, and again before the next one.
    """
    measured = []
    for number, event in enumerate(events):
        commits = list_commits(lines, without=event["worker"])
        end_s = commits[-1].time_s
        end_s = min([end_s, *(e["time_s"] for e in events[number + 1 :] if not e["is_hasty"])])
        close = [event, *events[number + 1 : number + 2]]
        found: dict[str, Any] = {"is_alone": not any(each["is_hasty"] for each in close)}
        if event["kind"] == "kill":
            found["next_step_s"] = find_next_epoch(commits, event["time_s"])
            found["pause_s"] = find_pause(commits, event["time_s"], end_s)
        elif event["kind"] == "loss":
            found |= measure_loss(commits, event["time_s"])
        elif event["kind"] == "stop":
            woken_s = event.get("woken_s", end_s)
            found["pause_s"] = find_pause(commits, event["time_s"], min(end_s, woken_s))
            found["return_pause_s"] = find_pause(commits, woken_s, max(end_s, woken_s))
            found["back_s"] = _find_own_step(lines, event["worker"], woken_s)
        else:
            found["pause_s"] = find_pause(commits, event["time_s"], end_s)
            found["in_s"] = _find_own_step(lines, event["worker"], event["time_s"])
            ready_s = _find_ready(lines, event["worker"], event["time_s"])
            if ready_s is not None:
                found["joined_s"] = _find_own_step(lines, event["worker"], ready_s)
            found["change_s"] = _find_change(lines, commits, event["worker"])
        measured.append({**event, **found})
    return measured


def measure_loss(commits: list[Line], moment_s: float) -> dict[str, float | None]:
    """Return what the loss of all workers cost.

    Returns:
        ``again_s``: seconds to the next step that was committed. ``regained_s``: to the first one
        that had not been committed before. ``steps_lost``: committed steps that were taken back.
    """
    last = max(line.step for line in commits if line.time_s <= moment_s)
    epoch = max(line.epoch for line in commits if line.time_s <= moment_s)
    # Some may write down a step as the others are killed.
    later = [line for line in commits if line.time_s > moment_s and line.epoch > epoch]
    new = [line.time_s for line in later if line.step > last]
    return {
        "again_s": later[0].time_s - moment_s if later else None,
        "regained_s": new[0] - moment_s if new else None,
        "steps_lost": last + 1 - later[0].step if later else None,
    }


def _find_ready(lines: list[Line], worker: int, moment_s: float) -> float | None:
    ready = (line for line in lines if line.worker == worker and line.kind == "ready")
    return next((line.time_s for line in ready if line.time_s > moment_s), None)


def _find_change(lines: list[Line], commits: list[Line], worker: int) -> float | None:
    """Return seconds between others' last step before a newcomer's first epoch, and first in it."""
    epoch = next((line.epoch for line in lines if (line.worker, line.kind) == (worker, "step")), -1)
    before = [line.time_s for line in commits if line.epoch < epoch]
    after = [line.time_s for line in commits if line.epoch == epoch]
    return min(after) - max(before) if before and after else None


def _find_own_step(lines: list[Line], worker: int, moment_s: float) -> float | None:
    steps = (line for line in lines if line.worker == worker and line.kind == "step")
    found = next((line.time_s for line in steps if line.time_s > moment_s), None)
    return None if found is None else found - moment_s


def trace_steps(lines: list[Line], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run as a line of time, in seconds from its first committed step.

    Returns:
        ``step_s``, when each step of each epoch was first committed; ``members``, moments from
        which that many workers committed each step; and the events, with their moments.
    """
    commits = list_commits(lines)
    zero_s = commits[0].time_s
    voters: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in lines:
        if line.kind == "step":
            voters[line.epoch, line.step].add(line.worker)
    members: list[list[float]] = []
    for line in commits:
        n_members = len(voters[line.epoch, line.step])
        if not members or members[-1][1] != n_members:
            members.append([round(line.time_s - zero_s, 3), n_members])
    names = {"time_s", "woken_s", "settled_s"}
    return {
        "step_s": [round(line.time_s - zero_s, 3) for line in commits],
        "members": members,
        "events": [
            {n: round(v - zero_s, 3) if n in names else v for n, v in event.items()}
            for event in events
        ],
    }


def measure_growth(lines: list[Line]) -> list[dict[str, Any]]:
    """Return what processes of the longest lives hold, at their beginning and at their end.

    Those that have lived through several epochs: torchelastic starts others for each.
    """
    starts: dict[tuple[int, int], int] = defaultdict(int)
    processes: dict[tuple[int, int, int], list[Line]] = defaultdict(list)
    for line in lines:
        own = line.worker, line.life
        starts[own] += line.kind == "ready"
        if line.kind == "step":
            processes[(*own, starts[own])].append(line)
    found = []
    for (worker, _, _), steps in sorted(processes.items(), key=lambda item: -len(item[1])):
        held = [line.held for line in steps[SETTLED_STEPS:] if line.held]
        n_epochs = len({line.epoch for line in steps})
        if len(held) > 1 and n_epochs > 1:
            first, last = (dict(zip(RESOURCES, held[place], strict=True)) for place in (0, -1))
            most = dict(zip(RESOURCES, map(max, *held), strict=True))
            lived_s = round(steps[-1].time_s - steps[0].time_s, 1)
            row = {"worker": worker, "lived_s": lived_s, "epochs": n_epochs}
            found.append({**row, "first": first, "last": last, "most": most})
    return found[:3]


def find_usual_steps(
    commits: list[Line], events: list[dict[str, Any]]
) -> tuple[float, float | None]:
    """Return the median time of a step, and of one while a newcomer catches up; None for none.

    Args:
        commits: The first line of each step.
        events: What happened, with what it cost. Steps of a join from the newcomer's readiness to
            its own first step do not count as usual.
    """
    usual, meanwhile = [], []
    windows = []
    for event in events:
        if event.get("joined_s") is not None:
            end_s = event["time_s"] + event["in_s"]
            windows.append((end_s - event["joined_s"], end_s))
    for before, after in pairwise(commits):
        gap = after.time_s - before.time_s
        if any(begin_s <= before.time_s and after.time_s < end_s for begin_s, end_s in windows):
            meanwhile.append(gap)
        elif not any(
            begin_s < after.time_s and before.time_s < end_s for begin_s, end_s in windows
        ):
            usual.append(gap)
    # Where a newcomer was on its way all the time, those steps are the usual ones.
    found = statistics.median(usual or meanwhile)
    return found, statistics.median(meanwhile) if meanwhile else None


def summarize(lines: list[Line], record: dict[str, Any]) -> dict[str, Any]:
    """Return what a run of a system showed."""
    commits = list_commits(lines)
    first_s, last_s = commits[0].time_s, commits[-1].time_s
    gaps = [after.time_s - before.time_s for before, after in pairwise(commits)]
    events = measure_events(lines, record["events"])
    usual_s, meanwhile_s = find_usual_steps(commits, events)
    return {
        "seconds": round(last_s - first_s, 1),
        "last_step": max(line.step for line in commits),
        "usual_step_s": round(usual_s, 4),
        "step_meanwhile_s": None if meanwhile_s is None else round(meanwhile_s, 4),
        "seconds_lost": round(sum(gap - usual_s for gap in gaps if gap > 5 * usual_s), 1),
        "steps_repeated": count_repeated(lines),
        "attempts_failed": sum(line.kind == "failed" for line in lines),
        "steps_compared": len({(line.epoch, line.step) for line in lines if line.kind == "step"}),
        "forks": find_forks(lines),
        "epochs": len({line.epoch for line in commits}),
        "accidents": record["accidents"],
        "peak_kib": max(record.get("peaks_kib", {}).values(), default=0),
        "events": events,
        "growth": measure_growth(lines),
    }
