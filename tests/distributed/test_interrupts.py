"""Ctrl-C on one worker: a step is committed by all or by none, and the others hear who has left.

The interrupted rank lives on, as in a notebook: no connection closes, and no timeout is near.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distlion
import matrix
from accident import ACCIDENT_STEP, STEPS, compute_until, digest_state, do_step, make_optimizer
from checkpoint.runs import Worker
from cluster import run_workers
from distlion import faults
from distlion.checkpoint import verify_checkpoint
from distlion.peers import meetings, weights
from distlion.wire.gloo import GlooTransfer
from tiers import in_tiers

pytestmark = pytest.mark.distributed

VICTIM = 1
FAR_S = 300.0
"""Of every timeout: an error that comes is none of them."""


class Left(SystemExit):
    """Raised by a handler of SIGTERM, as by those of frameworks."""


def leave(number: int, frame: object) -> None:
    raise Left(128 + number)


@dataclass(frozen=True)
class Scene:
    """One interrupt.

    Attributes:
        point: The fault point where it comes; "waiting" for a wait of the victim for a late peer.
        options: Of the optimizer.
        number: The signal.
        is_elsewhere: Whether the system delivers it to another thread than Python's main one, which
            no signal wakes then.
    """

    point: Any
    options: dict[str, Any] = field(default_factory=dict)
    number: int = signal.SIGINT
    is_elsewhere: bool = False


@dataclass(frozen=True)
class Report:
    """How one rank came out: what it raised, its steps, digests by step, and what came next."""

    kind: str
    text: str
    culprits: tuple[int, ...]
    counter: int
    digests: dict[int, str]
    final: str
    afterwards: str


OVERLAP = {"overlap": True, "bucket_elements": 1024}
SYNC = {"momentum_sync": distlion.MomentumSync(every=1)}
INSIDE = [
    point for point in faults.POINTS if point not in ("before_step", "after_commit", "checkpoint")
]
SCENES = {
    **{
        f"{pattern}, {mode}, {point}": Scene(point, {"exchange": exchange} | options)
        for pattern, exchange in matrix.PATTERNS.items()
        for mode, options in {"plain": {}, "overlap": OVERLAP}.items()
        for point in ["waiting", *INSIDE, "after_commit"]
        if (pattern, point) != ("parameter-server", "counted")  # the server alone counts
    },
    "averaged momenta": Scene("counted", SYNC),
    **{
        f"{mode}, heard by another thread": Scene("waiting", options, is_elsewhere=True)
        for mode, options in {"plain": {}, "overlap": OVERLAP}.items()
    },
    "SystemExit": Scene("framed", {"exchange": distlion.AllReduce()}, signal.SIGTERM),
}
QUICK = [
    *(f"{pattern}, plain, waiting" for pattern in matrix.PATTERNS),
    "all-gather, overlap, waiting",
    "all-reduce, plain, before_commit",
    "plain, heard by another thread",
    "overlap, heard by another thread",
    "SystemExit",
]


def listen() -> None:
    """Hear signals as a script does; ``cluster`` lets workers ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, leave)


def play(rank: int, world_size: int, scenes: list[Scene], folder: str) -> list[Report]:
    """Meet one interrupt after the other, each in a process group of its own."""
    listen()
    return [meet(rank, scene, Path(folder) / str(number)) for number, scene in enumerate(scenes)]


def meet(rank: int, scene: Scene, place: Path) -> Report:
    options = {"process_group": dist.new_group(), **scene.options}
    optimizer = make_optimizer(FAR_S, options)
    if scene.is_elsewhere:  # behind the optimizer, whose threads take this mask
        signal.pthread_sigmask(signal.SIG_BLOCK, [scene.number])
    if scene.point == "waiting":
        stage_a_wait(optimizer, rank, place)
    elif rank == VICTIM:
        arm(scene.point, functools.partial(signal.raise_signal, scene.number))
    report = observe(optimizer, rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [scene.number])
    if rank == VICTIM or scene.point == "waiting":
        assert all(fault.fired for fault in faults.armed), "a fault did not fire"
    faults.disarm_all()
    return report


def arm(point: Any, action: Callable[[], Any], *, rank: int = VICTIM) -> None:
    """Let something happen once, where a rank first comes to a point within ``step()``.

    With overlap, votes on earlier buckets pass the same points during backward.
    """
    happened = []

    def happen(subject: object) -> None:
        if begun.fired and not happened:
            happened.append(point)
            action()

    begun = faults.arm(
        rank=rank, step=ACCIDENT_STEP, point="before_step", action=lambda subject: None
    )
    faults.arm(rank=rank, step=ACCIDENT_STEP, point=point, action=happen)


def stage_a_wait(
    optimizer: distlion.DistributedLion, rank: int, place: Path, *, signals: int = 1
) -> None:
    """Let rank 0 come to its step only when the victim, which waits there, has been interrupted."""
    place.mkdir(exist_ok=True)
    waiting, heard = place / "waiting", place / "heard"

    def interrupt() -> None:
        compute_until(waiting.exists)
        for number in range(signals):
            os.kill(int(waiting.read_text()), signal.SIGINT)
            compute_until(heard.with_name(f"heard{number}").exists)

    def hear(number: int, frame: object) -> None:
        heard.with_name(f"heard{len(list(place.glob('heard*')))}").touch()
        signal.default_int_handler(number, frame)  # type: ignore[arg-type]

    def tell(subject: object) -> None:
        if fault.fired == n_buckets:
            partial = waiting.with_suffix(".part")
            partial.write_text(str(os.getpid()))
            partial.rename(waiting)

    if rank != VICTIM:
        arm("before_step", interrupt, rank=rank)
        return
    signal.signal(signal.SIGINT, hear)
    # The last bucket's vote is encoded within step(), also with overlap.
    n_buckets = len(optimizer._session.routing.buckets)
    fault = faults.arm(rank=rank, step=ACCIDENT_STEP, point="after_encode", action=tell)


def observe(optimizer: distlion.DistributedLion, rank: int) -> Report:
    """Train until something is raised."""
    caught: BaseException | None = None
    digests = {}
    try:
        while optimizer.committed_step < STEPS:
            do_step(optimizer, rank)
            digests[optimizer.committed_step] = digest_state(optimizer)[1]
    except BaseException as error:
        caught = error
    return Report(
        kind=type(caught).__name__,
        text=str(caught),
        culprits=getattr(caught, "culprits", ()),
        counter=optimizer.committed_step,
        digests=digests,
        final=digest_state(optimizer)[1],
        afterwards=raised_by(optimizer.step),
    )


def raised_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@functools.cache
def reports(*names: str, world_size: int = 2) -> dict[str, list[Report]]:
    with tempfile.TemporaryDirectory() as folder:
        scenes = [SCENES[name] for name in names]
        rows = run_workers(play, world_size, scenes, folder, timeout_s=240)
    return {name: [row[number] for row in rows] for number, name in enumerate(names)}


@pytest.mark.parametrize("name", in_tiers(SCENES, lambda name: name in QUICK))
def test_an_interrupted_step_is_committed_by_all_and_the_others_hear_who_left(name: str) -> None:
    quick = name in QUICK
    other, victim = reports(*(each for each in SCENES if (each in QUICK) == quick))[name]
    raised = "Left" if SCENES[name].number == signal.SIGTERM else "KeyboardInterrupt"
    assert victim.kind == raised, victim.text
    assert other.kind == "PeerLostError", other.text
    assert other.culprits == (VICTIM,)
    assert "rank 1 left, and is no longer waited for" in other.text
    assert raised in other.text
    assert victim.counter == other.counter == ACCIDENT_STEP + 1
    assert victim.final == other.final == other.digests[ACCIDENT_STEP + 1]
    assert victim.afterwards.startswith("ProcessGroupError")
    assert raised in victim.afterwards
    assert f"came during step {ACCIDENT_STEP}" in victim.afterwards


def interrupt_twice(rank: int, world_size: int, folder: str) -> Report:
    listen()
    optimizer = make_optimizer(FAR_S, {"exchange": distlion.AllReduce()})
    stage_a_wait(optimizer, rank, Path(folder), signals=2)
    return observe(optimizer, rank)


def test_a_second_interrupt_leaves_at_once_and_the_others_hear_of_it(tmp_path: Path) -> None:
    """Rank 0 comes to its step after both signals: only then it could have ended the first one."""
    other, victim = run_workers(interrupt_twice, 2, str(tmp_path))
    assert victim.kind == "KeyboardInterrupt"
    assert other.kind == "PeerLostError", other.text
    assert other.culprits == (VICTIM,)
    assert f"step {ACCIDENT_STEP} failed (KeyboardInterrupt)" in other.text
    assert victim.counter == other.counter == ACCIDENT_STEP
    assert victim.final == other.final == other.digests[ACCIDENT_STEP]


def interrupt_waits(once: list[bool]) -> None:
    """Let the next wait for a transfer be one in which Ctrl-C comes."""
    wait = GlooTransfer.wait

    def interrupted(transfer: GlooTransfer) -> None:
        if once:
            once.clear()
            signal.raise_signal(signal.SIGINT)
        wait(transfer)

    GlooTransfer.wait = interrupted  # type: ignore[method-assign]


def verify(worker: Worker, folder: str) -> None:
    worker.optimizer.verify_replicas()


def save(worker: Worker, folder: str) -> None:
    worker.save(folder)


def load(worker: Worker, folder: str) -> None:
    worker.load(folder)


CALLS = {"verify_replicas()": verify, "save_checkpoint()": save, "load_checkpoint()": load}


def interrupt_call(rank: int, world_size: int, call: str, folder: str) -> tuple[str, str, bool]:
    """Interrupt a call on one rank; what it raised, what comes next, whether a tensor changed."""
    listen()
    worker = Worker(rank)
    worker.train(0, 2)
    if call == "load_checkpoint()":
        worker.save(folder)
        worker.train(2, 3)
    before = worker.tensors()
    once: list[bool] = []
    interrupt_waits(once)
    if rank == VICTIM:
        once.append(True)
    raised = raised_by(lambda: CALLS[call](worker, folder))
    assert not once
    changed = not all(a.equal(b) for a, b in zip(before, worker.tensors(), strict=True))
    return raised, raised_by(lambda: worker.train(2, 3)), changed


@pytest.mark.parametrize("call", in_tiers(CALLS, lambda call: call == "save_checkpoint()"))
def test_an_interrupted_call_is_completed_or_undone_by_all(call: str, tmp_path: Path) -> None:
    other, victim = run_workers(interrupt_call, 2, call, str(tmp_path))
    assert victim[0].startswith("KeyboardInterrupt")
    assert victim[1].startswith("ProcessGroupError")
    lost = other[0] if call == "load_checkpoint()" else other[1]  # it is several meetings
    assert lost.startswith("PeerLostError")
    assert "rank 1 left" in lost
    assert f"KeyboardInterrupt came during {call}" in lost
    assert not other[2]
    assert not victim[2]
    if call == "save_checkpoint()":
        assert other[0] == "nothing"
        assert not verify_checkpoint(tmp_path).problems
        assert not list(tmp_path.glob("partial-*"))


def interrupt_construction(rank: int, world_size: int, folder: str, question: str) -> str:
    """Interrupt a question of the handshake on a rank that waits for a late one."""
    listen()
    left, once = Path(folder) / "left", list[bool]()
    interrupt_waits(once)
    module = {"settings": meetings, "weights": weights}[question]
    ask = module.ask_texts

    def ask_late(*args: Any, **options: Any) -> list[str]:
        if rank == VICTIM:
            once.append(True)
        else:
            compute_until(left.exists)
        return ask(*args, **options)

    module.ask_texts = ask_late
    raised = raised_by(lambda: make_optimizer(FAR_S, {}))
    left.touch()
    return raised


@pytest.mark.parametrize("question", ["settings", "weights"])
def test_an_interrupt_ends_construction_at_once_and_for_all(question: str, tmp_path: Path) -> None:
    other, victim = run_workers(interrupt_construction, 2, str(tmp_path), question)
    assert victim.startswith("KeyboardInterrupt")
    assert other.startswith("PeerLostError")
    assert "rank 1 left" in other
