"""Play planned events on the workers of a system, and note when each happened."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from event_plan import START_WITH, PlannedEvent
from fleet import POLL_S, Fleet, SoakError
from systems import System, build_system

SETTLE_LIMIT_S, SETTLE_SILENCES = 90.0, 20
"""Seconds, or times ``silence_s``: beyond them the next event comes, though not all train again."""
STEPS_LIMIT_S = 1200.0
QUIET_S = 5.0
"""Of undisturbed training before the first event and after the last."""


@dataclass
class Soak:
    """A run of one system through a plan.

    Args:
        fleet: Its workers.
        name: Of the system, for progress.
        settle_s: How long it may take until all train again.

    Attributes:
        happened: Of each event: kind, worker, time_s, woken_s, settled_s.
    """

    fleet: Fleet
    name: str
    settle_s: float = SETTLE_LIMIT_S
    happened: list[dict[str, Any]] = field(default_factory=list)
    _lost_step: int = -1
    _asleep: dict[int, tuple[float, dict[str, Any]]] = field(default_factory=dict)

    def play(self, plan: list[PlannedEvent], start_with: int) -> None:
        """Let all happen that is planned to so many workers."""
        for worker in range(start_with):
            self.fleet.start(worker)
        self._settle(time.monotonic())
        self._spend(QUIET_S)
        for number, event in enumerate(plan):
            if self.happened and not event.is_hasty:
                since_s = self._settle(self.happened[-1]["time_s"])
                self.happened[-1]["settled_s"] = since_s
            self._spend(event.delay_s)
            self._await_step(event.at_step)
            self._act(event)
            self._say(f"event {number + 1}/{len(plan)}: {event.kind} worker {event.worker}")
        self._settle(self.happened[-1]["time_s"] if self.happened else 0.0)
        self._await_step(self._lost_step + 1)
        self._spend(QUIET_S)

    def _act(self, event: PlannedEvent) -> None:
        now_s = time.monotonic()
        note: dict[str, Any] = {"kind": event.kind, "worker": event.worker, "time_s": now_s}
        note |= {"is_hasty": event.is_hasty, "n_awake": self.fleet.n_awake}
        if event.kind == "kill":
            self.fleet.kill(event.worker)
        elif event.kind == "loss":
            self._lost_step = self.fleet.find_last_step()
            self.fleet.restart()
        elif event.kind == "stop":
            self.fleet.stop(event.worker)
            self._asleep[event.worker] = now_s + event.stop_s, note
        else:
            self.fleet.start(event.worker)
        self.happened.append(note)

    def _await_step(self, step: int) -> None:
        """Wait until some worker has committed a step, for ``STEPS_LIMIT_S`` at most."""
        limit_s = time.monotonic() + STEPS_LIMIT_S
        while self.fleet.find_last_step() < step:
            if time.monotonic() > limit_s:
                raise SoakError(f"step {step} was not committed within {STEPS_LIMIT_S:g} s")
            self._spend(POLL_S)

    def _settle(self, since_s: float) -> float:
        """Wait until all are awake and train together; return when they did."""
        limit_s = time.monotonic() + self.settle_s
        while time.monotonic() < limit_s:
            self._spend(POLL_S)
            woken_s = max((note.get("woken_s", 0.0) for note in self.happened), default=0.0)
            if not self._asleep and self.fleet.has_settled(max(since_s, woken_s)):
                return time.monotonic()
        self._say(f"not all train together after {self.settle_s:g} s")
        return time.monotonic()

    def _spend(self, seconds: float) -> None:
        """Let time pass, in which sleepers wake and the dead are replaced."""
        end_s = time.monotonic() + seconds
        while True:
            for worker, (due_s, note) in list(self._asleep.items()):
                if time.monotonic() >= due_s:
                    self.fleet.wake(worker)
                    note["woken_s"] = time.monotonic()
                    del self._asleep[worker]
            self.fleet.replace_the_dead()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(POLL_S, left_s))

    def _say(self, what: str) -> None:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {self.name} {what}\n")
        sys.stderr.flush()


def run_soak(name: str, plan: list[PlannedEvent], folder: Path) -> dict[str, Any]:
    """Play a plan on a system, as ``play``."""
    folder.mkdir(parents=True)
    return play(build_system(name, folder), plan, START_WITH)


def play(system: System, plan: list[PlannedEvent], start_with: int) -> dict[str, Any]:
    """Play a plan on so many workers of a system.

    Returns:
        What happened; logs are in its folder.
    """
    name, folder = system.name, system.folder
    settle_s = max(SETTLE_LIMIT_S, SETTLE_SILENCES * system.size.silence_s)
    began_s = time.monotonic()
    with Fleet(system, folder) as fleet:
        soak = Soak(fleet, name, settle_s)
        soak.play(plan, start_with)
        ended_s = time.monotonic()
    record = {
        "system": name,
        "tuning": system.tuning,
        "began_s": began_s,
        "ended_s": ended_s,
        "events": soak.happened,
        "accidents": fleet.accidents,
        "peaks_kib": {life.log.stem: life.peak_kib for life in fleet.lives},
    }
    (folder / "record.json").write_text(json.dumps(record, indent=1))
    return record
