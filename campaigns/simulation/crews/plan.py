"""A schedule of a crew: who comes when, what is trained, and what goes wrong."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import distlion
from distlion.votes.registry import RULES
from simulation.network import Delays
from simulation.plan import _draw_delays, _draw_options

Kind = Literal[
    "die", "stop", "cut", "split", "unheard", "late", "leave", "abandon", "stale", "store",
    "restart",
]  # fmt: skip
KINDS: tuple[Kind, ...] = (
    "die", "stop", "cut", "split", "unheard", "late", "leave", "abandon", "stale", "store",
)  # fmt: skip
Phase = Literal["forming", "training", "committed", "ending"]
WAIT_S = 100.0
"""How long fewer than ``min_workers`` wait for others."""
STORE_WAIT_S = 60.0
"""How long those who need it wait for a store that is away."""
REFUSED = ("nodes", "momentum_sync")


@dataclass(frozen=True)
class CrewFault:
    """A fault: its kind, its victim and its moment.

    Attributes:
        kind: "die"; "stop", for ``seconds``; "cut" from ``peer``; "split": it and its ``side`` are
            cut off from all others, with or without the store; "unheard": cut off from the store;
            "late": it computes for ``seconds``; "leave": its script fails; "abandon": so that its
            main thread ends without a word, while others keep the process; "stale": in place of a
            message it sends one of an earlier epoch; "store": the store dies, or is stopped;
            "restart": it dies, and after ``seconds`` an empty one takes its place.
        victim: Its number.
        phase: What the victim is at: it forms an epoch, trains in one, has just committed, or has
            taken its last step and does not know of the others yet.
        time: How often it was at that before; of a commit, how many before.
        after: Messages and requests since.
        seconds: How long; math.inf for good.
        peer: The other end of what is cut.
        side: Of a split: who is on the victim's side.
        ways: Directions of a cut: from the victim, to it, or both.
        holds_for_store: Whether a split cuts the store off too.
        restarts_after_s: When another process comes in its place; None for never.
    """

    kind: Kind
    victim: int
    phase: Phase
    time: int
    after: int
    seconds: float = math.inf
    peer: int = 0
    side: tuple[int, ...] = ()
    ways: Literal["from", "to", "both"] = "both"
    holds_for_store: bool = False
    restarts_after_s: float | None = None

    @property
    def is_endless_cut(self) -> bool:
        """True if it keeps machines apart for good."""
        return self.kind in ("cut", "split", "unheard") and self.seconds == math.inf


@dataclass(frozen=True)
class Coming:
    """A worker that comes while others train: once somebody has committed so many steps."""

    at_step: int
    after_s: float


@dataclass(frozen=True)
class CrewPlan:
    """One schedule of a crew.

    Attributes:
        seed: What it was drawn from.
        starts_s: By number, when each of the first workers comes.
        comings: Who comes later; their numbers follow.
        min_workers, max_workers, newcomers: Of the crew; None for no most.
        sizes: Elements of each parameter.
        rules: For each param group, the name of its rule.
        options: Further arguments of the optimizer.
        goal: Steps.
        delays: Of messages.
        compute_s: The longest time between two steps.
        skew_s: The largest difference between clocks and the true time.
        absent: Whether gradients are missing now and then.
        faults: What goes wrong.
        replay_steps: Most replies that wait for a newcomer; None where none is planned to catch up.
        lanes: Processes of each worker. Where there are several, numbers in faults are those of
            processes, and those of a worker follow each other.
    """

    seed: int
    starts_s: tuple[float, ...]
    comings: tuple[Coming, ...]
    min_workers: int
    max_workers: int | None
    newcomers: str
    sizes: tuple[int, ...]
    rules: tuple[str, ...]
    options: dict[str, Any]
    goal: int
    delays: Delays
    compute_s: float
    skew_s: float
    absent: bool
    faults: tuple[CrewFault, ...]
    replay_steps: int | None = None
    lanes: int = 1

    @property
    def is_slow(self) -> bool:
        """True if a late message can make an exchange exceed its limit."""
        slow_s: float = 0.1 * self.options["timeouts"].step_s
        return self.delays.straggling_s > slow_s

    @property
    def is_beyond_limits(self) -> bool:
        """True if one late message alone can exceed the limit of an exchange.

        With five workers every fourth exchange then fails, and an epoch takes eight to form.
        """
        limit_s: float = self.options["timeouts"].step_s
        return self.delays.straggling_s > limit_s

    @property
    def admits(self) -> bool:
        """True if workers let others in before they compute, not in their next step."""
        return self.seed % 2 == 0

    @property
    def n_workers(self) -> int:
        """Workers, those who come later among them; not those who come again."""
        return len(self.starts_s) + len(self.comings)

    @property
    def has_endless_cuts(self) -> bool:
        """True if some machines may be kept apart for good."""
        return any(fault.is_endless_cut for fault in self.faults)


def draw_crew_plan(seed: int) -> CrewPlan:
    """Draw a schedule."""
    chance = random.Random(f"crew {seed}")
    size = chance.choice((2, 3, 3, 3, 4, 4, 5))
    sizes = tuple(chance.choice((1, 7, 65, 300)) for _ in range(chance.choice((1, 2, 2, 3))))
    n_groups = 2 if len(sizes) > 1 and chance.random() < 0.3 else 1
    options = {key: value for key, value in _draw_options(chance, 3).items() if key not in REFUSED}
    if chance.random() < 0.9:
        options["nonfinite"] = "raise"
    timeout_s = options["timeouts"].step_s
    goal = chance.choice((3, 5, 8, 12))
    comings = tuple(
        Coming(chance.randrange(goal - 1), chance.choice((0.0, chance.uniform(0, 4))))
        for _ in range(chance.choice((0, 0, 1, 1, 2)))
    )
    n_workers = size + len(comings)
    return CrewPlan(
        seed=seed,
        starts_s=tuple(chance.choice((0.0, chance.uniform(0, 3))) for _ in range(size)),
        comings=comings,
        min_workers=chance.choice((2, 2, min(3, size))),
        max_workers=max(3, size) if chance.random() < 0.1 else None,
        newcomers=chance.choice(("zeros", "zeros", "donor", "mean")),
        sizes=sizes,
        rules=tuple(_draw_rule(chance) for _ in range(n_groups)),
        options=options,
        goal=goal,
        delays=_draw_delays(chance, timeout_s, is_slow=chance.random() < 0.05),
        compute_s=chance.choice((0.02, 0.3, 1.0)),
        skew_s=chance.choice((0.0, 0.0, 0.1, 0.5)),
        absent=chance.random() < 0.2,
        faults=_draw_faults(chance, n_workers, size, goal, timeout_s),
    )


def draw_join_plan(seed: int) -> CrewPlan:
    """Draw a schedule in which newcomers catch up with a donor, and faults strike both."""
    chance = random.Random(f"join {seed}")
    plan = draw_crew_plan(seed)
    size, goal = len(plan.starts_s), chance.choice((10, 16, 24))
    stateless = [name for name in sorted(RULES) if not RULES[name].rule.worker_state]
    n_coming = chance.choice((1, 1, 2, 3))
    comings = tuple(
        Coming(chance.randrange(1, 4), chance.choice((0.0, chance.uniform(0, 2))))
        for _ in range(n_coming)
    )
    timeout_s = plan.options["timeouts"].step_s
    faults = list(plan.faults[:1]) if chance.random() < 0.3 else []
    for _ in range(chance.choice((0, 1, 1, 2, 2))):
        fault = _draw_fault(chance, size + n_coming, size, goal, timeout_s, before=None)
        victim, phase, after = chance.choice(
            (
                (chance.randrange(size, size + n_coming), "forming", chance.randrange(160)),
                (chance.randrange(size), "training", chance.randrange(400)),
            )
        )
        faults.append(replace(fault, victim=victim, phase=phase, time=0, after=after))
    return replace(
        plan,
        comings=comings,
        max_workers=None,
        newcomers="zeros",
        sizes=tuple(chance.choice((7, 65, 300, 1500)) for _ in plan.sizes),
        rules=tuple(chance.choice(stateless) for _ in plan.rules),
        goal=goal,
        faults=tuple(each for each in faults if each.victim != each.peer),
        replay_steps=chance.choice((1, 3, 64, 64)),
    )


def draw_outage_plan(seed: int) -> CrewPlan:
    """Draw a schedule in which the store is lost and comes back empty, once or twice."""
    chance = random.Random(f"outage {seed}")
    plan = draw_join_plan(seed) if chance.random() < 0.3 else draw_crew_plan(seed)
    goal, size = max(8, plan.goal), len(plan.starts_s)
    faults = [
        each
        for each in plan.faults
        if not each.is_endless_cut and (each.kind, each.seconds) != ("store", math.inf)
    ]
    for _ in range(chance.choice((1, 1, 1, 2))):
        phase: Phase = chance.choice(("forming", "training", "training", "committed", "ending"))
        after, time = chance.randrange(90), chance.choice((0, 0, 1))
        if phase == "committed":
            after, time = 0, chance.choice((goal - 1, chance.randrange(goal)))
        elif phase == "ending":
            after, time = 0, 0
        lost = CrewFault(
            "restart",
            chance.randrange(size),
            phase,
            time,
            after,
            seconds=chance.choice((0.3, 2.0, 6.0, 15.0)) * chance.uniform(0.5, 1.5),
        )
        faults.append(lost)
        if phase != "ending" and chance.random() < 0.4:  # somebody else is lost meanwhile
            fault = _draw_fault(chance, plan.n_workers, size, goal, 1.0, before=None)
            if not fault.is_endless_cut and fault.kind != "store":
                later = replace(fault, phase=phase, time=time + (phase == "committed"))
                faults.append(replace(later, after=0 if phase == "committed" else after + 2))
    return replace(plan, goal=goal, faults=tuple(faults))


def draw_machine_plan(seed: int) -> CrewPlan:
    """Draw a schedule of workers that have several processes each, with whole parameters."""
    chance = random.Random(f"machines {seed}")
    plan = draw_crew_plan(seed)
    lanes = chance.choice((2, 2, 2, 3))
    options = {**plan.options, "overlap": False, "agreement": distlion.Agreement()}

    def place(worker: int) -> int:
        return worker * lanes + chance.randrange(lanes)

    faults = [
        replace(
            fault,
            victim=place(fault.victim),
            peer=place(fault.peer),
            side=tuple(worker * lanes + lane for worker in fault.side for lane in range(lanes)),
        )
        for fault in plan.faults
    ]
    return replace(plan, options=options, faults=tuple(faults), lanes=lanes)


def _draw_rule(chance: random.Random) -> str:
    if chance.random() < 0.25:
        return chance.choice([name for name in sorted(RULES) if name.startswith("feedback")])
    return chance.choice(sorted(RULES))


def _draw_faults(
    chance: random.Random, n_workers: int, size: int, goal: int, timeout_s: float
) -> tuple[CrewFault, ...]:
    faults: list[CrewFault] = []
    for _ in range(chance.choices((0, 1, 2, 3), (6, 44, 30, 20))[0]):
        before = faults[-1] if faults and chance.random() < 0.4 else None  # several at once
        faults.append(_draw_fault(chance, n_workers, size, goal, timeout_s, before=before))
    return tuple(faults)


def _draw_fault(
    chance: random.Random,
    n_workers: int,
    size: int,
    goal: int,
    timeout_s: float,
    *,
    before: CrewFault | None,
) -> CrewFault:
    kind: Kind = chance.choices(KINDS, (34, 16, 10, 8, 9, 6, 2, 2, 4, 6))[0]
    victim = chance.randrange(size if chance.random() < 0.8 else n_workers)
    others = [number for number in range(n_workers) if number != victim]
    phase: Phase = chance.choices(("forming", "training", "committed"), (45, 40, 15))[0]
    time = chance.choice((0, 0, 0, 1, 1, 2))
    if phase == "committed":
        time = chance.choice((goal - 1, chance.randrange(goal)))
    after = chance.choice((0, chance.randrange(8), chance.randrange(30), chance.randrange(90)))
    if before is not None:
        phase, time, after = before.phase, before.time, before.after + chance.choice((0, 0, 1, 5))
    seconds = chance.choice((0.3, 1.5, 3.0, 6.0)) * chance.uniform(0.5, 1.5)
    if chance.random() < 0.15 or (kind == "store" and chance.random() < 0.5):
        seconds = math.inf
    if kind == "late":
        seconds = min(seconds, 2.5 * timeout_s)
    return CrewFault(
        kind,
        victim,
        phase,
        time,
        0 if phase == "committed" else after,
        seconds=seconds,
        peer=chance.choice(others),
        side=tuple(number for number in others if chance.random() < 0.35),
        ways=chance.choice(("from", "to", "both", "both")),
        holds_for_store=chance.random() < 0.3,
        restarts_after_s=chance.uniform(0, 5) if chance.random() < 0.4 else None,
    )
