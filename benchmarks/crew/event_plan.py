"""Events of a soak, drawn ahead from a seed: every system gets the same ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "join", "loss"]
EVERYBODY = -1
"""The worker of an event that all meet."""
FEWEST, MOST = 3, 6
"""Workers that run, the stopped ones aside; workers in all."""
START_WITH = 4
START_LARGE_WITH = 3
"""Of a large network, for the machine's memory."""
SPARED_FOR = 100
"""Events after which another worker is spared from kills: one that lives long shows leaks."""
STOP_S = (1.0, 10.0)
CALM_S = (0.5, 2.5)
HASTE_S = (0.0, 2.0)
SHARE_HASTY = 0.2


@dataclass(frozen=True)
class PlannedEvent:
    """One event.

    Attributes:
        kind: What happens.
        worker: To whom; of a join, who comes; of a loss ``EVERYBODY``: all are killed at once, and
            started again.
        stop_s: How long it is stopped; 0 for other events.
        delay_s: From the event before, or from when all train again.
        is_hasty: Whether it comes before all train again after the event before.
        at_step: The step that some worker has to commit before.
    """

    kind: Kind
    worker: int
    stop_s: float
    delay_s: float
    is_hasty: bool
    at_step: int = 0


def plan_timeline() -> list[PlannedEvent]:
    """Return a stop, two kills and two joins, each after all train together again."""
    steps: list[tuple[Kind, int, float]] = [
        ("stop", 2, 6.0),
        ("kill", 1, 0.0),
        ("kill", 0, 0.0),
        ("join", START_WITH, 0.0),
        ("join", START_WITH + 1, 0.0),
    ]
    return [PlannedEvent(kind, worker, stop_s, 4.0, False) for kind, worker, stop_s in steps]


def plan_stops(n_events: int, seed: int) -> list[PlannedEvent]:
    """Draw stops of single workers, each as long as it takes to give one up."""
    chance = random.Random(seed)
    return [
        PlannedEvent("stop", chance.randrange(START_WITH), 6.0, chance.uniform(*CALM_S), False)
        for _ in range(n_events)
    ]


def plan_sizes(stop_s: float, start_with: int) -> list[PlannedEvent]:
    """Plan what happens to workers of a large network, each once all train together.

    There is never more than one worker beyond those at the start.
    """
    newcomers, workers, plan = itertools.count(start_with), list(range(start_with)), []
    kinds: tuple[Kind, ...] = ("join", "kill", "join", "stop", "kill", "join")
    for kind in kinds:
        if kind == "join":
            workers.append(worker := next(newcomers))
        else:
            worker = workers[0] if kind == "stop" else workers.pop(1)
        stopped_s = stop_s if kind == "stop" else 0.0
        plan.append(PlannedEvent(kind, worker, stopped_s, CALM_S[1], is_hasty=False))
    return plan


def plan_losses(save_every: int) -> list[PlannedEvent]:
    """Plan two losses of all workers, each some steps after a checkpoint."""
    after = save_every // 4
    return [
        PlannedEvent("loss", EVERYBODY, 0.0, 0.0, is_hasty=False, at_step=save_every * n + after)
        for n in (1, 2)
    ]


def plan_events(n_events: int, seed: int) -> list[PlannedEvent]:
    """Draw events; workers 0 to ``START_WITH`` - 1 are there at the start."""
    chance = random.Random(seed)
    workers, asleep, spared = list(range(START_WITH)), -1, START_WITH - 1
    next_worker, hasty, plan = START_WITH, False, []
    for number in range(n_events):
        if number and number % SPARED_FOR == 0:
            spared = workers[-1]
        hasty = bool(number) and not hasty and chance.random() < SHARE_HASTY
        asleep = asleep if hasty else -1
        awake = [worker for worker in workers if worker != asleep]
        mortal = [worker for worker in awake if worker != spared]
        kinds = [*(["kill", "stop"] if len(awake) > FEWEST else []), *(["join"] * 2)]
        kinds = kinds if len(workers) < MOST else ["kill", "stop"]
        kind: Kind = chance.choice(kinds)  # type: ignore[assignment]
        worker = chance.choice(mortal if kind == "kill" else awake)
        if kind == "kill":
            workers.remove(worker)
        elif kind == "stop":
            asleep = worker
        else:
            worker, next_worker = next_worker, next_worker + 1
            workers.append(worker)
        stop_s = round(chance.uniform(*STOP_S), 2) if kind == "stop" else 0.0
        delay_s = round(chance.uniform(*(HASTE_S if hasty else CALM_S)), 2)
        plan.append(PlannedEvent(kind, worker, stop_s, delay_s, hasty))
    return plan
