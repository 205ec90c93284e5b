"""Accidents in a vote on deltas: what happens to one worker, and how all come out of it.

Every worker ends where plain torch and the oracle of votes say: with so many local steps and so
many votes, and nothing in between.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import distlion
import matrix
from accident import AT_ONCE, note_accident
from cluster import run_workers
from distlion import errors, faults
from distlion.votes import Aggregation
from drawn import make_params
from failures import give_time
from local_runs import EVERY, SHAPES, PlainRun, are_equal, copies, make, make_adamw, train

N_WORKERS = 3
AT_VOTE = 1
"""The vote that accidents meet."""
BEFORE = EVERY * (AT_VOTE + 1) - 1
"""Local steps before it."""
OUTER: dict[str, Any] = {"outer_lr": 0.5, "outer_momentum": 0.9}
PLAIN_OUTER: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}
COMMITTED = ("before_commit", "after_commit")
"""Points at which a worker has sent all that the others need for this vote."""


@dataclass(frozen=True)
class VoteAccident:
    """A fault in a vote on deltas: its kind, its victim and its moment.

    Attributes:
        point: The fault point.
        firing: Which time the point is met in that vote, counted from 1.
        kind: "kill", "stop" (until all others have failed), or "damage" of the bytes to be sent.
        at_byte: The byte of each chunk that is damaged.
        victim: The rank.
        rule: The rule for deltas, with an outer momentum.
        exchange: The pattern.
        timeout_s: ``Timeouts.step_s``.
    """

    point: Any
    firing: int = 1
    kind: str = "kill"
    at_byte: int = 0
    victim: int = 1
    rule: Aggregation = field(default_factory=lambda: distlion.ResidualVote(2))
    exchange: Any = field(default_factory=distlion.AllReduce)
    timeout_s: float = 20.0


@dataclass(frozen=True)
class Ending:
    """How one rank came out.

    Attributes:
        kind, text, culprits: Of the error; "NoneType" without one.
        n_steps, n_votes: Local steps and committed votes at the error.
        fired: Times that the accident's point was met on this rank.
        tensors: The common point, this worker's parameters, and the outer momenta.
        afterwards: What another vote raised.
        is_whole: Whether that other vote left the tensors alone.
    """

    kind: str
    text: str
    culprits: tuple[int, ...]
    n_steps: int
    n_votes: int
    fired: int
    tensors: list[list[Tensor]]
    afterwards: str
    is_whole: bool


def list_tensors(optimizer: distlion.LocalSteps) -> list[list[Tensor]]:
    own = [param for param, _ in optimizer.list_pairs()]
    return [copies(each) for each in (optimizer.common_point, own, optimizer.outer_buffers)]


@functools.cache
def expect(rule: Aggregation, n_votes: int, n_steps: int, rank: int) -> list[list[Tensor]]:
    """Return the tensors of a worker after so many votes, of which the last was taken."""
    run = PlainRun(
        make_adamw,
        N_WORKERS,
        rule=matrix.describe_delta_rule(rule),
        **PLAIN_OUTER,
    ).do(n_votes * EVERY)
    run.every = 10**6
    run.do(n_steps - run.done)
    momenta = [torch.from_numpy(each) for each in run.oracle.buffers]
    return [run.common, copies(run.own[rank]), momenta]


def check_place(rule: Aggregation, rank: int, ending: Ending) -> None:
    """Check that a worker is where its counts say, to the last bit."""
    expected = expect(rule, ending.n_votes, ending.n_steps, rank)
    for found, wanted in zip(ending.tensors, expected, strict=True):
        assert are_equal([each.view(-1) for each in found], [each.view(-1) for each in wanted])


def meet(rank: int, world_size: int, accident: VoteAccident, folder: str) -> Ending:
    """Train until an error, through one more vote after the accident's."""
    give_time()
    scene, group = Path(folder), dist.new_group()
    params = make_params(SHAPES)
    optimizer = make(
        params,
        aggregation=accident.rule,
        exchange=accident.exchange,
        timeouts=distlion.Timeouts(step_s=accident.timeout_s),
        process_group=group,
        **OUTER,
    )
    armed: list[faults.Fault] = []
    if rank == accident.victim:
        armed.append(_arm(accident, scene))
    caught: Exception | None = None
    try:
        for step in range(BEFORE + 1 + EVERY):
            if step <= BEFORE:
                dist.barrier()  # whoever is slow is not lost
            train(optimizer, params.values(), rank, step, step + 1)
    except errors.StepError as error:
        caught = error
    faults.disarm_all()
    tensors = list_tensors(optimizer)
    counts = optimizer.local_step, optimizer.committed_step
    afterwards = _raised_by(optimizer.vote)
    (scene / f"failed{rank}").touch()
    if accident.kind == "stop" and rank != accident.victim:
        _wake(accident, scene)
    return Ending(
        type(caught).__name__,
        str(caught),
        getattr(caught, "culprits", ()),
        *counts,
        sum(fault.fired for fault in armed),
        tensors,
        afterwards,
        all(map(are_equal, list_tensors(optimizer), tensors)),
    )


def _arm(accident: VoteAccident, scene: Path) -> faults.Fault:
    def happen(subject: Any) -> None:
        if fault.fired != accident.firing:
            return
        note_accident(scene)
        if accident.kind == "damage":
            subject[..., accident.at_byte] ^= 1
        else:
            os.kill(os.getpid(), signal.SIGKILL if accident.kind == "kill" else signal.SIGSTOP)

    fault = faults.arm(rank=accident.victim, step=AT_VOTE, point=accident.point, action=happen)
    return fault


def _raised_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _wake(accident: VoteAccident, scene: Path) -> None:
    """Let the victim go on once every other rank has failed: the last one sees all the others."""
    others = [rank for rank in range(N_WORKERS) if rank != accident.victim]
    if all((scene / f"failed{rank}").exists() for rank in others):
        os.kill(int((scene / "accident").read_text()), signal.SIGCONT)


def stage_all(accidents: dict[str, VoteAccident]) -> dict[str, list[Any]]:
    """Let all happen, a few at once; return each rank's Ending, or WorkerDiedError."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(accidents, pool.map(_stage, accidents.values()), strict=True))


def _stage(accident: VoteAccident) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="distlion-test-") as folder:
        found = run_workers(meet, N_WORKERS, accident, folder, may_die=True, timeout_s=60)
        assert (Path(folder) / "accident").exists(), "the fault did not fire"
        return found
