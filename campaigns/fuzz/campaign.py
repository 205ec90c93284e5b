"""Many programs: each drawn, played, judged; of one that fails, what it takes to fail."""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from fuzz.equations import Equations, UnknownError
from fuzz.judge import Outcome, absent, attempt, compare, have_committed, judge
from fuzz.players import Player, Virtual, odd_defaults
from fuzz.program import MOST_OPERATIONS, Op, Program, Setup, draw_setup
from fuzz.table import TABLE
from fuzz.workers import Crew

MOST_TRIES = 40
"""Programs that are played to find a shorter one that fails."""


def draw_program(seed: int) -> Program:
    """Draw the program of a seed: for ranks where it is even, else for virtual workers."""
    random = Random(seed)
    setup = draw_setup(random, is_real=seed % 2 == 0)
    ops: list[Op] = []
    length = random.randint(2, MOST_OPERATIONS)
    while len(ops) < length:
        (name,) = random.choices(list(TABLE), [each.weight for each in TABLE.values()])
        args = TABLE[name].draw(random, setup)
        if args is None or (TABLE[name].is_last and len(ops) < length - 1):
            continue
        ops.append(Op(name, args))
    return Program(seed, setup, tuple(ops))


class InProcess:
    """The workers of one process, asked as ranks are."""

    def begin(self, setup: Setup, folder: Path) -> list[Outcome]:
        """Make them."""
        try:
            with odd_defaults(setup):
                self._player = Virtual(setup, folder)
        except Exception as error:
            return [absent("".join(traceback.format_exception(error)))]
        return [replace(absent(""), error=None, after=self._player.snapshots())]

    def play(self, op: Op) -> list[Outcome]:
        """Let them do an operation."""
        return [attempt(self._player, op)]


@dataclass
class Verdict:
    """What a program came to.

    Attributes:
        violations: What is not as it must be; nothing where all is well.
        at: The operation that showed it.
        endings: Of its operations: their names, and the error that ended them.
    """

    violations: list[str] = field(default_factory=list)
    at: Op | None = None
    endings: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Tell findings apart, roughly."""
        told = ("kind", "change", "call", "fault", "bad", "how", "params", "worker")
        args = {} if self.at is None else self.at.args
        chosen = [str(args[key]) for key in told if key in args][:1]
        text = re.sub(r"\(.*|[0-9]+", "", self.violations[0].strip().splitlines()[-1])[:80]
        return " ".join(["construction" if self.at is None else self.at.name, *chosen, text])


def play(program: Program, crew: Crew) -> Verdict:
    """Play a program, and judge each of its operations."""
    setup = program.setup
    with tempfile.TemporaryDirectory(prefix="distlion-fuzz-") as name:
        folder = Path(name)
        subject = crew if setup.is_real else InProcess()
        outcomes = subject.begin(setup, folder)
        refused = [outcome.text for outcome in outcomes if outcome.error is not None]
        if refused:
            return Verdict([f"the optimizer cannot be made: {refused[0]}"])
        kind = Virtual if setup.is_real else Equations
        model: Player | None = kind(setup, folder / "model")
        verdict = Verdict()
        violations = compare(outcomes, model)
        for op in program.ops:
            if violations:
                break
            verdict.at = op
            outcomes = subject.play(op)
            verdict.endings.append((op.name, outcomes[0].error))
            violations = judge(setup, op, outcomes)
            if violations or _is_over(op, outcomes):
                break
            model, violations = follow(model, op, outcomes)
        verdict.violations = violations
        return verdict


def _is_over(op: Op, outcomes: list[Outcome]) -> bool:
    """Whether there is nothing more to compare: dead workers, or what the program has spoiled."""
    operation = TABLE[op.name]
    is_spoiled = operation.is_last and not operation.is_modelled
    is_dead = any(outcome.is_dead for outcome in outcomes)
    return is_spoiled or (is_dead and not have_committed(outcomes))


def follow(
    model: Player | None, op: Op, outcomes: list[Outcome]
) -> tuple[Player | None, list[str]]:
    """Let the model do what the others have done, and compare."""
    if model is None:
        return None, []
    is_done = have_committed(outcomes) or not any(outcome.error for outcome in outcomes)
    if TABLE[op.name].is_modelled and is_done:
        try:
            TABLE[op.name].play(model, op.args)
        except UnknownError:
            return None, []
        except Exception as error:
            return model, [f"succeeds, and its model refuses it: {type(error).__name__}: {error}"]
    return model, compare(outcomes, model)


def shrink(program: Program, crew: Crew) -> Program:
    """Drop operations as long as what is left fails at the same operation."""
    found = play(program, crew)
    if not found.violations:
        return program  # it does not fail again
    tries = 0
    index = len(program.ops) - 1
    while index >= 0 and tries < MOST_TRIES:
        shorter = replace(program, ops=program.ops[:index] + program.ops[index + 1 :])
        tries, index = tries + 1, index - 1
        verdict = play(shorter, crew)
        if verdict.violations and verdict.kind == found.kind:
            program = shorter
    return program


@dataclass
class Tally:
    """What a number of programs came to.

    Attributes:
        programs, operations: How many.
        endings: Of operations, by name and error.
        failures: Programs that failed, shrunk, and what was found; the first of each kind.
        kinds: How often each kind of finding was found.
    """

    programs: int = 0
    operations: int = 0
    endings: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    failures: list[tuple[Program, Verdict]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def run(
    seeds: Iterable[int],
    crew: Crew,
    *,
    seconds: float,
    report: Callable[[Tally], None],
    shrinks: bool = True,
) -> Tally:
    """Play programs until the time is over.

    Args:
        seeds: Of the programs.
        crew: Who plays those of ranks.
        seconds: For all; one that has begun is played to its end.
        report: Called after each.
        shrinks: Whether to shrink what fails.
    """
    tally, end = Tally(), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end:
            break
        program = draw_program(seed)
        verdict = play(program, crew)
        tally.programs += 1
        tally.operations += len(verdict.endings)
        tally.endings.update(verdict.endings)
        if verdict.violations:
            crew.stop()
            tally.kinds[verdict.kind] += 1
            if tally.kinds[verdict.kind] == 1:
                small = shrink(program, crew) if shrinks else program
                tally.failures.append((small, verdict))
        report(tally)
    return tally


def describe(tally: Tally, seconds: float) -> str:
    """Write a summary of a few lines."""
    by_name: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for (name, error), count in tally.endings.items():
        by_name[name] += count
        refused[error or "succeeded"] += count
    lines = [
        f"{tally.programs} programs of {tally.operations} operations in {seconds:.0f} s",
        f"operations: {_list(by_name)}",
        f"endings: {_list(refused)}",
        f"{sum(tally.kinds.values())} programs failed, in {len(tally.kinds)} ways",
    ]
    return "\n".join([*lines, *(describe_failure(*failure) for failure in tally.failures)])


def describe_failure(program: Program, verdict: Verdict) -> str:
    """Write what a program found, and the command that plays it again."""
    lines = [f"seed {program.seed}: at {verdict.at}", *verdict.violations[:4], repr(program)]
    lines.append(f"play it again: make fuzz SEED={program.seed}")
    return "\n    ".join("\n".join(lines).splitlines())


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"
