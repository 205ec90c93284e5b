"""What must be true after every schedule, and what a fault excuses.

Always, whatever happened:

1. nobody hangs: each call ends within its timeout and a second, stops and computing aside;
2. all that committed a step have the same parameters after it;
3. all have committed equally many steps, or one more;
4. whoever raised is as it was, and a dead optimizer sends nothing any more;
5. collectives are never mixed up, and nothing but the package's own errors comes out of it;
6. what was damaged on the way is not committed;
7. a worker that comes back late trains neither with the others nor alone;
8. of a death whose connections close, whoever waits for that worker hears within two seconds.

Where nothing was worse than a delay below the timeout, or one worker was late for less than half
of the time that busy workers have beyond silent ones, nobody fails.

Where several fail, errors after which all go on are equal in each call, and those that end the
optimizer are equal in all: the same error, the same culprits; and of one fault that strikes one
worker, that worker is the culprit. This is excused where a worker cannot know:

- Whoever was itself stopped, late or cut off may find the others gone, with the store.
- Who failed is agreed on through the store. Where rank 0 keeps it and was stopped or is cut off,
  each worker is left with what it has seen by itself; where rank 0 has ended, all name it, and
  with nodes some only once they have waited in vain.
- Workers that have committed the last step and ended do not answer those who lost a peer in it, and
  may be named as gone too; or nobody, if the store went with them. Of two faults at once, one of
  which may be a slow network, so may workers that one of them has ended while the others lose a
  peer by the second.
- Bytes that were damaged on the way to one worker after the votes were counted (a reply; with
  ``AllGather``, the votes themselves) are known to that worker alone, with nodes to its node. It
  raises CorruptFrameError that names the sender; the others lose it, and name it.
- A worker that missed the end of a call does not raise what the others raised at it, just as it
  does not commit what they committed: it fails, and they do so in their next exchange.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlion import RecursiveDoubling
from simulation.plan import Fault
from simulation.play import Outcome, play, without_faults
from simulation.worker import CONSTRUCTION, SETTLING_S, Raised

TOLERANCE_S = 0.05
"""A hang is later than its bound by what one way to the store takes, a few times."""

NEWS_S = 2.0
"""From a closed connection to the error, settling included."""

MILD = 0.31
"""The share of a timeout up to which a delay must not hurt."""

LOSSES = ("PeerLostError", "StepTimeoutError")
CORRUPT = "CorruptFrameError"


def find_violations(outcome: Outcome) -> list[str]:
    """List what is not as it must be after a schedule; empty where all is well."""
    return [
        *outcome.trouble,
        *_find_wrong_by_itself(outcome),
        *_find_hangs(outcome),
        *_find_late_news(outcome),
        *_find_other_bits(outcome),
        *_find_apart(outcome),
        *_find_false_alarms(outcome),
        *_find_other_errors(outcome),
        *_find_wrong_blame(outcome),
        *_find_damage(outcome),
    ]


def _find_wrong_by_itself(outcome: Outcome) -> Iterator[str]:
    for rank, diary in enumerate(outcome.diaries):
        for text in diary.wrong:
            yield f"rank {rank} {text}"
    for diary in outcome.newcomers:
        yield from diary.wrong
        if diary.ending != "refused":
            yield f"a worker that came back {diary.ending or 'hangs'}"


def _find_hangs(outcome: Outcome) -> Iterator[str]:
    for machine in outcome.machines:
        if machine.worst_s > TOLERANCE_S:
            yield f"rank {machine.rank} hung for {machine.worst_s:.2f} s beyond its timeout"


def _find_late_news(outcome: Outcome) -> Iterator[str]:
    """Check that those who wait for a worker that dies learn it by its closed connections."""
    if len(outcome.fired) != 1 or outcome.plan.is_slow:
        return
    fault, died_s = outcome.fired[0]
    if fault.kind != "die":
        return
    for rank, diary in enumerate(outcome.diaries):
        raised = diary.fatal
        if raised is not None and raised.kind == "PeerLostError":
            waited_s = raised.at_s - max(died_s, raised.begun_s)
            if waited_s > NEWS_S:
                yield f"rank {rank} hears of a death {waited_s:.2f} s later"


def _find_other_bits(outcome: Outcome) -> Iterator[str]:
    # Damaged weights are compared before the first commit, and not before.
    first = 1 if _has_damaged(outcome, "weights") else 0
    for step in sorted({step for diary in outcome.diaries for step in diary.params}):
        values = {diary.params[step] for diary in outcome.diaries if step in diary.params}
        if step >= first and len(values) > 1:
            yield f"parameters differ after {step} steps"


def _find_apart(outcome: Outcome) -> Iterator[str]:
    committed = [diary.committed for diary in outcome.diaries]
    if max(committed) - min(committed) > 1:
        yield f"workers are more than a step apart: {committed}"


def _has_damaged(outcome: Outcome, framing: str) -> bool:
    return any(fault.kind == "damage" and fault.framing == framing for fault, _ in outcome.fired)


def _is_mild(outcome: Outcome, fault: Fault) -> bool:
    plan, lasts = outcome.plan, ("stop", "late", "cut")
    if fault.kind == "late" and plan.transport_s is None:
        return fault.seconds <= max(
            MILD * plan.timeouts.step_s, (plan.timeouts.busy_s - plan.timeouts.step_s) / 2
        )
    return fault.kind in lasts and fault.seconds <= MILD * plan.timeouts.step_s


def _find_false_alarms(outcome: Outcome) -> Iterator[str]:
    mild = [fault for fault, _ in outcome.fired if _is_mild(outcome, fault)]
    if outcome.plan.is_slow or len(mild) < len(outcome.fired) or len(mild) > 1:
        return
    for rank, diary in enumerate(outcome.diaries):
        if diary.ending != "finished":
            yield f"false alarm: rank {rank} {diary.ending} ({diary.fatal})"


def _impaired(outcome: Outcome) -> set[int]:
    """List the ranks that cannot be expected to know what the others agree on."""
    ranks, host = set(), outcome.store_host
    for fault, _ in outcome.fired:
        if fault.kind in ("stop", "late"):
            ranks.add(fault.victim)
        if fault.kind == "cut" and fault.holds_for_store and host in (fault.victim, fault.peer):
            ranks |= {fault.victim, fault.peer}
    if host in ranks and any(fault.kind in ("stop", "cut") for fault, _ in outcome.fired):
        ranks |= set(range(outcome.plan.size))
    return ranks


def _struck(outcome: Outcome) -> set[int]:
    """List the ranks that a fault other than damage has struck."""
    return {fault.victim for fault, _ in outcome.fired if fault.kind != "damage"}


def _has_lost_store(outcome: Outcome) -> bool:
    """Return whether the rank that keeps the store has ended before the others."""
    ends = {fault.victim for fault, _ in outcome.fired if fault.kind in ("die", "leave")}
    for rank, diary in enumerate(outcome.diaries):
        # On a slow network it may end by itself, where the others do not connect in time.
        if outcome.plan.is_slow and diary.fatal is not None and diary.fatal.call == CONSTRUCTION:
            ends.add(rank)
    return outcome.store_host in ends


def _may_time_out(outcome: Outcome) -> bool:
    """Return whether a rank may see no closed connection of a dead one, and wait its timeout."""
    return _has_lost_store(outcome) or _has_died_before_pairs(outcome)


def _has_died_before_pairs(outcome: Outcome) -> bool:
    """Return whether a rank died while pairs connect: one that has its pairs waits for theirs."""
    has_pairs = isinstance(outcome.plan.options["exchange"], RecursiveDoubling)
    return has_pairs and not any(diary.committed for diary in outcome.diaries)


def _finished(outcome: Outcome) -> set[int]:
    """Return the ranks that have taken all their steps: others may see that they are gone."""
    return {rank for rank, diary in enumerate(outcome.diaries) if diary.ending == "finished"}


def _names_ended(outcome: Outcome, raised: Raised) -> bool:
    """Return whether an error names ranks as gone that have ended meanwhile, for another reason.

    Nobody, where the rank that keeps the store is one of them: then it is not known who is gone.
    """
    diaries = list(enumerate(outcome.diaries))
    ended = _finished(outcome)
    # One worker may end by one fault, while others lose another one, or a message that is slow.
    if len(outcome.fired) + outcome.plan.is_slow > 1:
        ended |= {rank for rank, diary in diaries if diary.fatal and diary.fatal.kind not in LOSSES}
    named = set(raised.culprits) or {outcome.store_host}
    return bool(raised.kind in LOSSES and named & ended and named <= ended | _struck(outcome))


def _find_other_errors(outcome: Outcome) -> Iterator[str]:
    recoverable: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    fatal: dict[int, Raised] = {}
    for rank, diary in enumerate(outcome.diaries):
        for raised in diary.raised:
            if raised.is_recoverable:
                recoverable.setdefault(raised.call, set()).add((raised.kind, raised.culprits))
            elif raised.call != CONSTRUCTION:
                fatal[rank] = raised
    for call, errors in recoverable.items():
        if len(errors) > 1:
            yield f"errors of call {call} differ: {sorted(errors)}"
    impaired = _impaired(outcome)
    alone = {rank for rank, raised in fatal.items() if raised.kind == CORRUPT}
    if alone and len(alone) < len(fatal):
        gone = alone | _struck(outcome) | _finished(outcome)
        for rank in set(fatal) - alone - impaired:
            found = fatal.pop(rank)
            if found.kind not in LOSSES or not set(found.culprits) <= gone:
                yield f"rank {rank} raised {found.kind}{found.culprits} beside {sorted(alone)}"
    n_damaged = sum(fault.kind == "damage" for fault, _ in outcome.fired)
    known = {
        (
            "lost" if raised.kind in LOSSES and _may_time_out(outcome) else raised.kind,
            # Of two, each may have seen another one.
            () if raised.kind == CORRUPT and n_damaged > 1 else raised.culprits,
        )
        for rank, raised in fatal.items()
        if rank not in impaired and not _names_ended(outcome, raised)
    }
    if len(known) > 1:
        listed = {rank: (raised.kind, raised.culprits) for rank, raised in sorted(fatal.items())}
        yield f"errors differ: {listed}"


def _find_wrong_blame(outcome: Outcome) -> Iterator[str]:
    """Check that one fault of one worker is blamed on it, by all who can know."""
    if len(outcome.fired) != 1 or outcome.plan.is_slow:
        return
    fault = outcome.fired[0][0]
    if fault.kind in ("stop", "late") and fault.seconds < _returning_s(outcome, fault):
        return  # back while the others agree on who failed, or before
    expected = {
        "die": LOSSES if _may_time_out(outcome) else LOSSES[:1],
        "leave": LOSSES,  # whose process may live on for a while
        "stop": LOSSES,
        "late": LOSSES,
        "damage": () if fault.framing == "weights" else (CORRUPT, *LOSSES),
        "settings": ("ConfigMismatchError",),
        "call": ("ConfigMismatchError",),
    }.get(fault.kind, ())
    impaired = _impaired(outcome)
    for rank, diary in enumerate(outcome.diaries):
        raised = diary.fatal
        if not expected or raised is None or rank in impaired or raised.call == CONSTRUCTION:
            continue
        if _names_ended(outcome, raised):
            continue
        if raised.kind not in expected:
            yield f"rank {rank} raised {raised.kind} after {fault.kind}"
        has_majority = fault.kind not in ("settings", "call") or outcome.plan.size > 2
        lost = fault.kind == "damage" and raised.kind in LOSSES
        if has_majority and not lost and raised.culprits != (fault.victim,):
            yield f"rank {rank} blames {raised.culprits}, not rank {fault.victim}"


def _returning_s(outcome: Outcome, fault: Fault) -> float:
    plan = outcome.plan
    limit_s = plan.longest_wait_s if fault.kind == "late" else plan.timeouts.step_s
    return limit_s + 1.5 * SETTLING_S


def _find_damage(outcome: Outcome) -> Iterator[str]:
    """Compare what was committed beside damage with what is without it."""
    if "damage" not in {fault.kind for fault, _ in outcome.fired}:
        return
    whole = play(without_faults(outcome.plan))
    first = 1 if _has_damaged(outcome, "weights") else 0
    for rank, diary in enumerate(outcome.diaries):
        for step, state in diary.states.items():
            expected = whole.diaries[rank].states.get(step)
            if step >= first and expected is not None and state != expected:
                yield f"rank {rank} committed damaged bytes: step {step}"
                break
