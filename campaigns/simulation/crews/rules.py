"""What must be true after every schedule of a crew, and what a fault excuses.

Always, whatever happened:

1. an epoch has one roster, of ``min_workers`` or more, the most advanced first, and each member is
   listed as it was;
2. all who were in an epoch with so many steps have the same parameters: who entered it there, who
   committed them in it, and who asked for the next one from there;
3. an epoch begins with the parameters, the buffer, the schedule and the rate of its most advanced;
4. numbers of epochs and steps never fall on one worker, but for steps in which others are ahead by
   an epoch;
5. who counts votes with error feedback holds what each voter has said;
6. where ``min_workers`` is more than half of all, an epoch commits no second step once a later one
   has committed: nothing goes on as two runs;
7. who ends with an error ends with a ``CrewError``;
8. where one worker dies as all train, and nothing else happens, nobody forms an epoch in vain;
9. no epoch begins anew, of newcomers alone, while others that have trained reach the store;
10. nobody who runs is given up, however long it computes, within ``Timeouts.busy_s``;
11. a newcomer has no momentum, where ``newcomers`` is "zeros".

And there is progress. While the store lives, is reached, and ``min_workers`` live that reach each
other, they come to the goal: nobody waits for ever, and nobody is sent away but by a run that was
over before it could be let in, or by a store that was silent for 5 s. Machines that stay apart for
good excuse it, and so do messages that take longer than ``Timeouts.step_s``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from distlion.crew.store import STORE_TIMEOUT_S
from simulation.crews.estimates import NOTHING
from simulation.crews.plan import WAIT_S, CrewPlan
from simulation.crews.play import CrewOutcome
from simulation.crews.worker import CrewDiary, Entry

OVER = "the run is over"
FEW = "fewer than"
NO_STORE = "store"
APART = "not to each other"
BEHIND = "has fallen behind"
TORN = "have come to different steps"
ANOTHER = "have begun another run"
DOUBLE = "is another one's"
AFTER_S = 15.0
"""Seconds after a fault within which everybody knows what has become of others."""


def find_crew_violations(outcome: CrewOutcome) -> list[str]:
    """List what is not as it must be after a schedule; empty where all is well."""
    if outcome.plan.lanes > 1:
        return find_machine_violations(outcome)
    diaries = list(outcome.diaries.values())
    found = [
        *outcome.trouble,
        *(f"worker {diary.number}: {text}" for diary in diaries for text in diary.wrong),
        *_find_other_errors(diaries),
        *_find_other_crews(outcome, diaries),
        *_find_unknown_bits(diaries),
        *_find_no_progress(outcome, diaries),
    ]
    for crew in sorted({diary.crew for diary in diaries}):
        found += _find_crew_violations(outcome, [each for each in diaries if each.crew == crew])
    return found


def _find_crew_violations(outcome: CrewOutcome, diaries: list[CrewDiary]) -> list[str]:
    """List what is not as it must be among the workers of one crew."""
    return [
        *_find_other_rosters(outcome, diaries),
        *_find_other_bits(diaries),
        *_find_other_beginnings(outcome, diaries),
        *_find_steps_back(diaries),
        *_find_other_estimates(diaries),
        *_find_two_runs(outcome, diaries),
        *_find_vain_epochs(outcome, diaries),
        *_find_new_beginnings(outcome, diaries),
        *_find_given_up(outcome, diaries),
    ]


def find_machine_violations(outcome: CrewOutcome) -> list[str]:
    """List what is not as it must be after a schedule of workers with several processes.

    Besides, processes of a worker commit the same steps, but for the last one of a worker that has
    ended; and a worker that nothing has struck ends well where enough of them are left.
    """
    diaries = list(outcome.diaries.values())
    return [
        *outcome.trouble,
        *(f"process {diary.number}: {text}" for diary in diaries for text in diary.wrong),
        *_find_other_rosters(outcome, diaries),
        *_find_other_bits(diaries),
        *_find_other_beginnings(outcome, diaries),
        *_find_steps_back(diaries),
        *_find_other_errors(diaries),
        *_find_torn_workers(outcome, diaries),
        *_find_lost_workers(outcome, diaries),
    ]


def _list_workers(diaries: list[CrewDiary]) -> dict[int, list[CrewDiary]]:
    """List the processes of each worker that has come to the crew, by its id."""
    found: dict[int, list[CrewDiary]] = {}
    for diary in diaries:
        if diary.id >= 0:
            found.setdefault(diary.id, []).append(diary)
    return found


def _find_torn_workers(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    for identity, processes in _list_workers(diaries).items():
        keys = [[key for key, _, _ in diary.commits] for diary in processes]
        shortest, longest = min(keys, key=len), max(keys, key=len)
        has_ended = any(diary.ending != "finished" for diary in processes)
        differ = len(longest) - len(shortest)
        if longest[: len(shortest)] != shortest or differ > has_ended:
            yield f"processes of worker {identity} committed {keys}"
        texts = [diary.error[1] for diary in processes if TORN in diary.error[1]]
        struck = {fault.victim for fault, _ in outcome.fired} | {
            fault.peer for fault, _ in outcome.fired if fault.kind == "cut"
        }
        if not {diary.number for diary in processes} & struck and any(
            TORN in each for each in texts
        ):
            yield f"worker {identity}, which nothing has struck: {texts}"


def _find_lost_workers(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    kinds = {fault.kind for fault, _ in outcome.fired}
    if outcome.is_stuck and not _is_impaired(outcome) and not outcome.plan.is_beyond_limits:
        yield f"no end: {[diary.number for diary in diaries if diary.ending == 'has no end']}"
    if kinds - {"die", "leave", "abandon", "late", "stale", "stop"} or outcome.plan.is_slow:
        return
    struck, lanes = (
        {fault.victim // outcome.plan.lanes for fault, _ in outcome.fired},
        outcome.plan.lanes,
    )
    whole = [
        [outcome.diaries[number * lanes + lane] for lane in range(lanes)]
        for number in range(len(outcome.plan.starts_s))
        if number not in struck
    ]
    if len(whole) < outcome.plan.min_workers:
        return
    for processes in whole:
        if any(diary.ending != "finished" for diary in processes):
            # One that came late may find that the others have ended.
            endings = [(diary.number, diary.ending, *diary.error) for diary in processes]
            if not any(OVER in diary.error[1] for diary in processes):
                yield f"a worker that nothing has struck: {endings}"


def _list_entries(diaries: list[CrewDiary]) -> dict[int, list[tuple[CrewDiary, Entry]]]:
    entries: dict[int, list[tuple[CrewDiary, Entry]]] = {}
    for diary in diaries:
        for entry in diary.entries:
            entries.setdefault(entry.number, []).append((diary, entry))
    return entries


def _find_other_rosters(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    for number, entered in _list_entries(diaries).items():
        rosters = {entry.members for _, entry in entered}
        if len(rosters) > 1:
            yield f"epoch {number} has {len(rosters)} rosters: {rosters}"
        for diary, entry in entered:
            if list(entry.progress) != sorted(entry.progress, reverse=True):
                yield f"epoch {number}: the most advanced is not the first: {entry.members}"
            if len(entry.members) < outcome.plan.min_workers:
                yield f"epoch {number} has {len(entry.members)} members"
            listed = [member[1:] for member in entry.members if member[0] == diary.id]
            if len(listed) != 1 or listed[0] not in [place[:2] for place in diary.before]:
                yield f"epoch {number} lists worker {diary.number} as {listed}, not as it was"


def _find_other_bits(diaries: list[CrewDiary]) -> Iterator[str]:
    found: dict[tuple[int, int], set[int]] = {}
    for diary in diaries:
        for entry in diary.entries:
            found.setdefault((entry.number, entry.step), set()).add(entry.params)
        for key, params, _ in diary.commits:
            found.setdefault(key, set()).add(params)
        for (epoch, step, params, _), follows in zip(diary.before, diary.followed, strict=True):
            if follows:  # its parameters are its donor's
                continue
            if epoch:
                found.setdefault((epoch, step), set()).add(params)
            elif step:
                yield f"worker {diary.number} is new, and at step {step}"
        yield from _find_untrained_bits(diary)
    for key, values in sorted(found.items()):
        if len(values) > 1:
            yield f"parameters of epoch {key[0]}, step {key[1]}, have {len(values)} outcomes"


def _find_untrained_bits(diary: CrewDiary) -> Iterator[str]:
    """Find a newcomer that follows nobody, and has kept parameters of an epoch that failed."""
    places = [
        (place, has_trained)
        for place, (_, has_trained), follows in zip(
            diary.before, diary.tried, diary.followed, strict=False
        )
        if not follows
    ]
    for (before, has_trained), (after, _) in pairwise(places):
        # Weights that nobody has trained yet may be those of another one.
        if has_trained and after[0] == 0 and before[2] != after[2]:
            yield f"worker {diary.number} has taken parameters of an epoch that failed"


def _find_unknown_bits(diaries: list[CrewDiary]) -> Iterator[str]:
    """Find workers that have caught up to parameters that no member had."""
    known = {entry.params for diary in diaries for entry in diary.entries}
    known |= {params for diary in diaries for _, params, _ in diary.commits}
    for diary in diaries:
        for place, follows in zip(diary.before, diary.followed, strict=True):
            if follows and place[2] not in known:
                yield f"worker {diary.number} has caught up to parameters that nobody had"


def _find_other_beginnings(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    # The first member of an epoch may have failed as it connected, and so belong to no crew.
    outside = [diary for diary in outcome.diaries.values() if not diary.crew]
    by_id = {diary.id: diary for diary in (*outside, *diaries)}
    for number, entered in _list_entries(diaries).items():
        first_id, epoch, step = entered[0][1].members[0]
        # An empty store may have given the number of one that is gone anew.
        first = {**by_id, **{diary.id: diary for diary, _ in entered}}[first_id]
        places = zip(first.before, first.followed, strict=True)
        known = [place for place, follows in places if place[:2] == (epoch, step) and not follows]
        for diary, entry in entered:
            if known and entry.params != known[-1][2]:
                yield f"epoch {number}: worker {diary.number} has not the most advanced parameters"
            if entry.step != step:
                yield f"epoch {number}: worker {diary.number} is at step {entry.step}, not {step}"
            is_behind = [m[1:] for m in entry.members if m[0] == diary.id] != [(epoch, step)]
            if is_behind and known and entry.buffer != known[-1][3]:
                yield f"epoch {number}: worker {diary.number} has another buffer"
    carried: dict[tuple[int, int], set[tuple[int, int, float]]] = {}
    for diary in diaries:
        for key, state in diary.carried.items():
            carried.setdefault(key, set()).add(state)
    for key, states in sorted(carried.items()):
        if len(states) > 1:
            yield f"what is carried differs in epoch {key[0]}, step {key[1]}: {sorted(states)}"


def _find_steps_back(diaries: list[CrewDiary]) -> Iterator[str]:
    for diary in diaries:
        numbers = [number for number, _ in diary.tried if number]
        if numbers != sorted(set(numbers)):
            yield f"worker {diary.number} came to epochs {numbers}"
        for entry in diary.entries:
            steps = [key[1] for key, _, _ in diary.commits if key[0] == entry.number]
            if steps != list(range(entry.step + 1, entry.step + 1 + len(steps))):
                yield f"worker {diary.number}, epoch {entry.number} from {entry.step}: {steps}"


def _find_other_estimates(diaries: list[CrewDiary]) -> Iterator[str]:
    for number, entered in _list_entries(diaries).items():
        said = {key: value for _, entry in entered for key, value in entry.own.items()}
        held = {key for _, entry in entered for key in entry.held}
        unheard = [key for key, value in said.items() if value != NOTHING and key not in held]
        if unheard and len(entered) == len(entered[0][1].members):
            yield f"epoch {number}: nobody holds estimates {unheard[:3]}"
        for diary, entry in entered:
            wrong = [key for key, value in entry.held.items() if said.get(key, value) != value]
            if wrong:
                yield f"epoch {number}: worker {diary.number} holds other estimates: {wrong[:3]}"


def _find_two_runs(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    if 2 * outcome.plan.min_workers <= len(diaries):
        return
    first_s: dict[int, float] = {}
    commits = sorted((at_s, key) for diary in diaries for key, _, at_s in diary.commits)
    for at_s, (number, _) in commits:
        first_s.setdefault(number, at_s)
    for number in first_s:
        later_s = min((s for other, s in first_s.items() if other > number), default=float("inf"))
        new: set[int] = set()
        old = {key[1] for at_s, key in commits if key[0] == number and at_s <= later_s}
        new = {key[1] for at_s, key in commits if key[0] == number and at_s > later_s} - old
        if len(new) > 1:
            yield f"epoch {number} went on beside a later one: steps {sorted(new)}"


def _find_other_errors(diaries: list[CrewDiary]) -> Iterator[str]:
    for diary in diaries:
        kind, text = diary.error
        if diary.ending == "broken":
            yield f"worker {diary.number} ended with {kind}: {text}"
        if diary.ending == "raised" and kind != "CrewError":
            yield f"worker {diary.number} raised {kind}: {text}"


def _find_other_crews(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    """Find crews that were begun beside another one; only in an empty store one may be."""
    crews = {diary.crew for diary in diaries if diary.crew}
    n_restarts = sum(fault.kind == "restart" for fault, _ in outcome.fired)
    if len(crews) > 1 + n_restarts:
        yield f"{len(crews)} crews, where the store was started again {n_restarts} times"
    for diary in diaries:
        if ANOTHER in diary.error[1] and len(crews) < 2:
            yield f"worker {diary.number} found another crew where there was none"


def _is_impaired(outcome: CrewOutcome) -> bool:
    """Return whether a fault lets even those fail who live."""
    return any(
        fault.is_endless_cut or (fault.kind == "store" and fault.seconds == float("inf"))
        for fault, _ in outcome.fired
    )


def _may_miss_store(outcome: CrewOutcome) -> bool:
    """Return whether the store was silent for some for so long that they take it for lost."""
    return any(
        fault.kind in ("store", "unheard") or (fault.kind == "split" and fault.holds_for_store)
        for fault, _ in outcome.fired
        if fault.seconds > STORE_TIMEOUT_S - 1
    ) or any(fault.kind == "restart" for fault, _ in outcome.fired)


def _is_known_limit(plan: CrewPlan, diary: CrewDiary) -> bool:
    """Return whether a worker may have been sent away with its words."""
    text = diary.error[1]
    is_behind = plan.replay_steps is not None and BEHIND in text
    came_too_early = DOUBLE in text and not diary.entries
    is_apart = plan.is_beyond_limits and APART in text
    return is_behind or came_too_early or is_apart or ANOTHER in text


def _find_no_progress(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    if _is_impaired(outcome):
        return
    least = outcome.plan.min_workers
    finished_s = min((d.ended_s for d in diaries if d.ending == "finished"), default=float("inf"))
    if outcome.is_stuck and not outcome.plan.is_beyond_limits:  # it may not have had time enough
        yield f"no end: {[diary.number for diary in diaries if diary.ending == 'has no end']}"
    for diary in diaries:
        if diary.ending != "raised":
            continue
        text, began_s = diary.error[1], diary.ended_s - WAIT_S
        if OVER in text:
            # Who ends it waits first until its members have come to their end.
            if finished_s > diary.ended_s + 1:
                yield f"worker {diary.number} heard too early that the run is over"
            # A large model takes long to come.
            since_s = diary.started_s + (4 if outcome.plan.replay_steps is None else 20)
            # Others may have waited for one that was struck, and this worker for its donor.
            struck = {fault.victim for fault, _ in outcome.fired}
            ends_s = [at_s + min(fault.seconds, AFTER_S) for fault, at_s in outcome.fired]
            since_s = max([since_s, *(end_s + AFTER_S for end_s in ends_s)])
            missed = {key for d in diaries for key, _, at_s in d.commits if at_s > since_s}
            plan = outcome.plan
            # In a slow network it may have stayed away, so that others could connect.
            is_free = diary.number not in struck and not plan.is_slow
            has_place = is_free and plan.max_workers is None
            if has_place and len(missed) > 2 and not diary.entries:
                yield f"worker {diary.number} was not let in while others trained: {missed}"
        elif FEW in text:
            there = [
                other
                for other in diaries
                if other.started_s < began_s and other.ended_s >= diary.ended_s - 1
                and other.ending in ("finished", "raised", "has no end")
            ]  # fmt: skip
            # In a slow network it may have failed each time that it was let in.
            if len(there) >= least and not outcome.plan.is_slow:
                yield f"worker {diary.number} says too few came, of {len(there)}: {text}"
        elif _is_known_limit(outcome.plan, diary):
            continue
        elif NO_STORE not in text or diary.entries or not _may_miss_store(outcome):
            yield f"worker {diary.number} was sent away: {text}"


def _find_vain_epochs(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    plan, fired = outcome.plan, outcome.fired
    if len(fired) != 1 or plan.comings or plan.is_slow:
        return
    (fault, at_s), alive = fired[0], [diary for diary in diaries if diary.ending == "finished"]
    is_plain = (fault.kind, fault.phase, fault.restarts_after_s) == ("die", "training", None)
    earlier = [(entry, d.id) for d in diaries for entry in d.entries if entry.at_s <= at_s]
    last = max((entry.number for entry, _ in earlier), default=0)
    there = {identity for entry, identity in earlier if entry.number == last}
    members = {
        member[0] for entry, _ in earlier if entry.number == last for member in entry.members
    }
    for diary in alive if is_plain and there == members else ():
        n_tried = sum(number > 0 for number, _ in diary.tried)
        if diary.id in members and n_tried > len(diary.entries):
            yield f"worker {diary.number} formed {n_tried} epochs in vain or not"


def _find_new_beginnings(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    kinds = {fault.kind for fault, _ in outcome.fired}
    if kinds - {"die", "leave", "abandon", "late", "stale", "cut"}:
        return  # others may have been silent for good
    for number, entered in _list_entries(diaries).items():
        entry = entered[0][1]
        is_new = all(epoch == 0 for _, epoch, _ in entry.members)
        for diary in diaries if is_new else ():
            earlier = [each for each in diary.entries if each.number < number]
            has_trained = any(each.at_s < entry.at_s for each in earlier)
            lives_on = diary.ending in ("finished", "raised") and diary.ended_s > entry.at_s + 3
            if has_trained and lives_on:
                yield f"epoch {number} begins anew while worker {diary.number} lives"


def _find_given_up(outcome: CrewOutcome, diaries: list[CrewDiary]) -> Iterator[str]:
    plan = outcome.plan
    if plan.comings or plan.is_slow or any(fault.kind != "late" for fault, _ in outcome.fired):
        return
    late_s = sum(fault.seconds for fault, _ in outcome.fired) + plan.compute_s
    if late_s > plan.options["timeouts"].busy_s - 1:
        return
    for diary in diaries:
        sizes = [len(entry.members) for entry in diary.entries]
        # Before all have come, members change without a fault.
        if len(diaries) in sizes[:-1]:
            yield f"worker {diary.number}, where at most one was late: epochs of {sizes} members"
