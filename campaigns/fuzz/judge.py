"""The oracle of every outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from distlion.errors import DistlionError
from fuzz import alone, failures, operations, states
from fuzz.players import STEP_TIMEOUT_S, Player, odd_defaults
from fuzz.program import Op, Setup
from fuzz.table import TABLE, Promise

MODULES = (operations, states, alone, failures)
"""Whose operations are in the table, because they have been imported."""

Snapshot = dict[str, str]

DIED = "died"
HUNG = "hangs"
PROMPT_S = 5.0
"""After a rank has failed in a step, all others know within this time.

Before a step it is in its user's code, where nobody tells the others: they wait for the timeout.
"""

VICTIM_ERRORS = (failures.PlannedError.__name__, "KeyboardInterrupt", DIED)


@dataclass(frozen=True)
class Outcome:
    """What came of an operation on one rank, or on the workers of one process.

    Attributes:
        error: The class of what was raised; None where it succeeded.
        is_typed: Whether it is one of ours.
        text: What was raised, with its traceback.
        before, after: All that each worker holds.
        is_dead: Whether the optimizer is of no more use.
        seconds: How long it took.
    """

    error: str | None
    is_typed: bool
    text: str
    before: list[Snapshot]
    after: list[Snapshot]
    is_dead: bool
    seconds: float

    @property
    def changed(self) -> list[str]:
        """Names of what has changed, of any worker."""
        pairs = zip(self.before, self.after, strict=True)
        return sorted({key for old, new in pairs for key, _ in old.items() ^ new.items()})


def absent(error: str) -> Outcome:
    """Return the outcome of a rank that has not answered."""
    return Outcome(error, False, error, [], [], True, 0.0)


def attempt(player: Player, op: Op) -> Outcome:
    """Let a player do an operation."""
    player.marked, before, found = None, player.snapshots(), None
    started_s = time.monotonic()
    try:
        with odd_defaults(player.setup):
            TABLE[op.name].play(player, op.args)
    except BaseException as error:
        found = error
    seconds = time.monotonic() - started_s
    return Outcome(
        None if found is None else type(found).__name__,
        isinstance(found, DistlionError),
        "" if found is None else "".join(traceback.format_exception(found)),
        player.marked or before,
        player.snapshots(),
        player.is_dead,
        seconds,
    )


def judge(setup: Setup, op: Op, outcomes: Sequence[Outcome]) -> list[str]:
    """Say what is not as it must be, of all ranks together."""
    promise = TABLE[op.name].promise(setup, op.args)
    if any(outcome.error == HUNG for outcome in outcomes):
        return [f"rank {rank} hangs" for rank, each in enumerate(outcomes) if each.error == HUNG]
    if promise is Promise.ATOMIC:
        return _judge_fault(op, outcomes)
    errors = [outcome.error for outcome in outcomes]
    found = [
        f"rank {rank}: an error that is none of ours: {outcome.text}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None and not outcome.is_typed
    ]
    if len(set(errors)) > 1:
        found.append(f"the ranks end differently: {errors}")
    if promise is Promise.OK and any(errors):
        found.append(f"refused, where it should succeed: {outcomes[0].text or errors}")
    if promise is Promise.REFUSED and not all(errors):
        found.append(f"succeeds, where it should be refused: {errors}")
    if len({outcome.is_dead for outcome in outcomes}) > 1:
        found.append(f"some are dead, and others not: {[each.is_dead for each in outcomes]}")
    found += [
        f"rank {rank}: refused ({outcome.error}), and yet it changed {outcome.changed}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None and outcome.changed
    ]
    return found


def have_committed(outcomes: Sequence[Outcome]) -> bool:
    """Whether all ranks have committed a step, and none has died."""
    return all(
        each.before and each.before[0]["committed_step"] != each.after[0]["committed_step"]
        for each in outcomes
    )


def _judge_fault(op: Op, outcomes: Sequence[Outcome]) -> list[str]:
    """Judge a step in which a rank failed: all have committed, or none, and then all hear of it.

    What a signal handler raises waits for the end of the step, which may be a commit.
    """
    victim, found, is_committed = op.args["victim"], [], have_committed(outcomes)
    fails_before = op.args.get("fault") in failures.OUTSIDE_OF_STEPS
    limit_s = PROMPT_S + STEP_TIMEOUT_S * fails_before
    alive = {rank: each for rank, each in enumerate(outcomes) if each.error != DIED}
    steps = {rank: each.after[0]["committed_step"] for rank, each in alive.items()}
    if len(set(steps.values())) > 1:
        found.append(f"some have committed the step, and others not: {steps}")
    for rank, outcome in alive.items():
        is_victim = rank == victim and outcome.error in VICTIM_ERRORS
        if outcome.error is not None and not outcome.is_typed and not is_victim:
            found.append(f"rank {rank}: an error that is none of ours: {outcome.text}")
        if outcome.error is not None and outcome.changed and not is_committed:
            found.append(f"rank {rank}: {outcome.error}, and yet it changed {outcome.changed}")
        if rank != victim and outcome.seconds > limit_s:
            found.append(f"rank {rank} hears of it after {outcome.seconds:.1f} s: {outcome.error}")
    others = {each.error for rank, each in alive.items() if rank != victim}
    if len(others) > 1 or (others == {None}) != is_committed:
        found.append(f"the others end with {others}; rank {victim} failed")
    return found


def compare(outcomes: Sequence[Outcome], model: Player) -> list[str]:
    """Compare what all ranks, or workers, hold with what the model holds for them."""
    held = [snapshot for outcome in outcomes for snapshot in outcome.after]
    found = []
    for worker, (ours, theirs) in enumerate(zip(held, model.snapshots(), strict=True)):
        keys = ours.keys() & theirs.keys() | {key for key in theirs if key.startswith("exp_avg")}
        differing = sorted(key for key in keys if ours.get(key) != theirs[key])
        if differing:
            shown = "; ".join(f"{key}: {ours.get(key)}, {theirs[key]}" for key in differing[:3])
            found.append(f"worker {worker} is not as the model in {differing} ({shown})")
    return found
