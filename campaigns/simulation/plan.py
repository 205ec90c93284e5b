"""A schedule: what is trained with which settings, over which network, and what goes wrong."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import distlion
from distlion.votes.registry import RULES
from distlion.wire import PATTERNS
from simulation.network import Delays

OF_ALL_RULES = sorted(name for name, each in PATTERNS.items() if not each.counts_in_parts)
"""Patterns that carry votes of every rule, and momenta."""
COUNTED = ("average", "majority", "ternary")
"""Rules that ``RecursiveDoubling`` carries too."""
FIRST_DOUBLING = 1_000_000
"""Schedules from this seed on are those of the seeds from 0 on, by ``RecursiveDoubling``."""
BUSY_SHARE = 6.0
"""In every second schedule, how many times as long a busy worker is waited for as a silent one."""
Kind = Literal["die", "stop", "cut", "damage", "late", "leave", "settings", "give up", "call"]
MESSAGE_FAULTS = ("die", "stop", "cut", "damage")
"""Faults that strike at a message; the others strike at a call of ``step()``."""

Framing = Literal["frame", "questions", "weights"]


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, its victim and its moment.

    Attributes:
        kind: "die"; "stop", for ``seconds``; "cut", towards ``peer``; "damage" of a message that
            the victim sends; "late", it computes for ``seconds``; "leave", it ends before the
            others; "settings", its lr is another one; "give up", it gives a step up that has begun;
            "call", it compares replicas in place of a step, which is never drawn.
        victim: Its rank.
        at: The message of the victim, or the call of ``step()``, that it strikes at, from 0.
        seconds: How long; math.inf for good.
        peer: The other end of what is cut.
        both_ways: Whether a cut silences both directions.
        holds_for_store: Whether a cut silences the store too, where the peer keeps it.
        framing: Which messages damage counts and strikes.
        restarts_after_s: When another process takes the place of one that died; None for never.
    """

    kind: Kind
    victim: int
    at: int
    seconds: float = math.inf
    peer: int = 0
    both_ways: bool = True
    holds_for_store: bool = True
    framing: Framing = "frame"
    restarts_after_s: float | None = None


@dataclass(frozen=True)
class Poison:
    """A gradient that is not finite: in which call, on whom, in which parameter."""

    call: int
    rank: int
    index: int


@dataclass(frozen=True)
class Plan:
    """One schedule.

    Attributes:
        seed: What it was drawn from.
        size: Workers.
        sizes: Elements of each parameter.
        rules: For each param group, the name of its rule; parameters take turns in joining them.
        options: Further arguments of ``DistributedLion``.
        steps: To be committed.
        delays: Of messages.
        compute_s: The longest time between two steps.
        lingers_s: By rank, how long a process lives on after its last step.
        has_agent: Whether an agent keeps the store.
        is_default: Whether the default group votes, and not one that is given.
        transport_s: How long the transport itself lets a collective take; None for no limit.
        most_at_once: Up to how many bytes an all-gather sends to all at once.
        absent: Whether gradients are missing now and then.
        poisons: Gradients that are not finite.
        faults: What goes wrong.
    """

    seed: int
    size: int
    sizes: tuple[int, ...]
    rules: tuple[str, ...]
    options: dict[str, Any]
    steps: int
    delays: Delays
    compute_s: float
    lingers_s: tuple[float, ...]
    has_agent: bool
    is_default: bool
    transport_s: float | None
    most_at_once: int
    absent: bool
    poisons: tuple[Poison, ...]
    faults: tuple[Fault, ...]

    @property
    def least_to_meet(self) -> int:
        """From how many bytes on workers wait for each other before a transfer."""
        return 1 if self.seed % 3 == 0 else 256 * 1024

    @property
    def timeouts(self) -> distlion.Timeouts:
        found: distlion.Timeouts = self.options["timeouts"]
        return found

    @property
    def longest_wait_s(self) -> float:
        """How long a call may wait: for a worker that is late, but runs."""
        return max(self.timeouts.step_s, self.timeouts.busy_s)

    @property
    def has_overlap(self) -> bool:
        return bool(self.options["overlap"])

    @property
    def is_slow(self) -> bool:
        """Whether a message may take so long that an exchange has no end in time."""
        return self.delays.straggling_s > 0.1 * self.timeouts.step_s

    @property
    def most_calls(self) -> int:
        """Calls of ``step()`` after which a worker stops, whatever was committed."""
        return self.steps + len(self.poisons) + len(self.faults) + 1

    @property
    def kinds(self) -> set[str]:
        """Kinds of its faults."""
        return {fault.kind for fault in self.faults}


def draw_plan(seed: int) -> Plan:
    """Draw a schedule."""
    if seed >= FIRST_DOUBLING:
        return _double(draw_plan(seed - FIRST_DOUBLING), seed)
    plan = _draw_impatient(seed)
    if seed % 2:
        return plan
    timeouts = replace(plan.timeouts, busy_s=BUSY_SHARE * plan.timeouts.step_s)
    return replace(plan, options={**plan.options, "timeouts": timeouts})


def _draw_impatient(seed: int) -> Plan:
    """Draw a schedule whose workers wait no longer for a busy worker than for a silent one."""
    chance = random.Random(seed)
    size = chance.choice((2, 2, 3, 3, 4, 4, 5))
    sizes = tuple(
        chance.choice((1, 7, 64, 65, 130, 300, 520)) for _ in range(chance.choice((1, 2, 3, 4)))
    )
    n_groups = 2 if len(sizes) > 1 and chance.random() < 0.3 else 1
    options = _draw_options(chance, size)
    steps = chance.choice((3, 3, 3, 4, 4, 5, 6))
    timeout_s = options["timeouts"].step_s
    poisons = _draw_poisons(chance, size, len(sizes), steps)
    slow = chance.random() < 0.08
    faults = _draw_faults(chance, size, len(sizes), steps, options)
    return Plan(
        seed=seed,
        size=size,
        sizes=sizes,
        rules=tuple(chance.choice(sorted(RULES)) for _ in range(n_groups)),
        options=options,
        steps=steps,
        delays=_draw_delays(chance, timeout_s, is_slow=slow),
        compute_s=chance.choice((0.001, 0.05, 0.15)) * timeout_s,
        lingers_s=tuple(chance.choice((0.0, 0.01, 0.5, 10.0)) for _ in range(size)),
        has_agent=chance.random() < 0.25,
        is_default=chance.random() < 0.5,
        transport_s=0.7 * timeout_s if chance.random() < 0.1 else None,
        most_at_once=chance.choice((64 * 1024, 64 * 1024, 200)),
        absent=chance.random() < 0.3,
        poisons=poisons,
        faults=faults,
    )


def _double(plan: Plan, seed: int) -> Plan:
    """Return a plan whose votes are added on their way, by rules that allow it."""
    chance = random.Random(seed)
    options = {**plan.options, "exchange": distlion.RecursiveDoubling(), "momentum_sync": None}
    clip = plan.options["clip_norm"]
    if clip is not None:
        options["clip_norm"] = replace(clip, scope="worker")
    rules = tuple(chance.choice(COUNTED) for _ in plan.rules)
    return replace(plan, seed=seed, options=options, rules=rules)


def _draw_options(chance: random.Random, size: int) -> dict[str, Any]:
    overlap = chance.random() < 0.35
    clip = None
    if not overlap and chance.random() < 0.25:
        clip = distlion.ClipNorm(0.5, scope=chance.choice(("worker", "global")))
    is_auto = chance.random() < 0.03
    in_nodes = size in (2, 4) and chance.random() < 0.4
    timeout_s = chance.choice((1.5, 2.0, 4.0))
    return {
        "lr": 1e-2,
        "weight_decay": chance.choice((0.0, 0.1)),
        "exchange": "auto" if is_auto else PATTERNS[chance.choice(OF_ALL_RULES)],
        "nodes": distlion.Nodes(ranks_per_node=2) if in_nodes else None,
        "momentum_sync": _draw_sync(chance),
        "overlap": overlap,
        "nonfinite": chance.choice(("raise", "skip", "abstain")),
        "clip_norm": clip,
        "bucket_elements": chance.choice((None, 64, 128, 600) if is_auto else (64, 128, 600)),
        "replicas": distlion.Replicas(check_every=chance.choice((1, 2, 1000))),
        "agreement": distlion.Agreement(every=chance.choice((None,) * 8 + (1, 2))),
        "timeouts": distlion.Timeouts(
            init_s=timeout_s * chance.choice((1.0, 2.0)), step_s=timeout_s, busy_s=timeout_s
        ),
        "seed": chance.randrange(1000),
    }


def _draw_sync(chance: random.Random) -> distlion.MomentumSync | None:
    if chance.random() < 0.6:
        return None
    dtype = chance.choice((torch.float32, torch.bfloat16))
    return distlion.MomentumSync(every=chance.choice((1, 2, 3)), dtype=dtype)


def _draw_delays(chance: random.Random, timeout_s: float, *, is_slow: bool) -> Delays:
    most_s = chance.choice((0.0005, 0.005, 0.02))
    store_s = chance.choice((0.0005, 0.005))
    if is_slow:  # at times too slow, at times not
        return Delays(0.0001, most_s, 0.05, chance.choice((0.3, 1.5)) * timeout_s, store_s)
    return Delays(0.0001, most_s, chance.choice((0.0, 0.05)), 0.03 * timeout_s, store_s)


def _draw_poisons(
    chance: random.Random, size: int, n_params: int, steps: int
) -> tuple[Poison, ...]:
    if chance.random() < 0.75:
        return ()
    return tuple(
        Poison(call, chance.randrange(size), chance.randrange(n_params))
        for call in chance.sample(range(steps), chance.choice((1, 1, 2)))
    )


def _draw_faults(
    chance: random.Random, size: int, n_params: int, steps: int, options: dict[str, Any]
) -> tuple[Fault, ...]:
    number = chance.choices((0, 1, 2), (8, 80, 12))[0]
    return tuple(_draw_fault(chance, size, n_params, steps, options) for _ in range(number))


def _draw_fault(
    chance: random.Random, size: int, n_params: int, steps: int, options: dict[str, Any]
) -> Fault:
    kinds: list[Kind] = ["die", "stop", "cut", "damage", "late", "leave", "settings"]
    weights = [25, 20, 15, 25, 6, 4, 4]
    if options["overlap"]:
        kinds.append("give up")
        weights.append(10)
    kind = chance.choices(kinds, weights)[0]
    victim = chance.randrange(size)
    peer = chance.choice([rank for rank in range(size) if rank != victim])
    timeout_s = options["timeouts"].step_s
    share = chance.choice((0.05, 0.3, chance.uniform(0.3, 1.5), 2.5, math.inf))
    framing: Framing = chance.choices(("frame", "questions", "weights"), (18, 1, 1))[0]
    return Fault(
        kind,
        victim,
        at=_draw_moment(chance, kind, size, n_params, steps=steps, framing=framing),
        seconds=min(share, 2.5) * timeout_s if kind == "late" else share * timeout_s,
        peer=peer,
        both_ways=chance.random() < 0.5,
        holds_for_store=chance.random() < 0.7,
        framing=framing,
        restarts_after_s=chance.uniform(0, 2) * timeout_s if chance.random() < 0.25 else None,
    )


def _draw_moment(
    chance: random.Random, kind: Kind, size: int, n_params: int, *, steps: int, framing: Framing
) -> int:
    """Draw the message, or the call, that a fault strikes at."""
    if kind not in MESSAGE_FAULTS:
        return chance.randrange(steps)
    if kind == "damage" and framing != "frame":
        return chance.randrange(size * (n_params if framing == "weights" else 2))
    # Each bucket of each step, there and back; what is beyond the last message never strikes.
    exchanged = (size - 1) * steps * min(n_params, 3)
    return chance.randrange(exchanged if kind == "damage" else 2 * exchanged + 4 * size)
