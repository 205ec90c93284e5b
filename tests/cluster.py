"""Run a function in several real worker processes that share one Gloo process group.

    def step_once(rank, world_size, lr): ...          # a function at the top level of a test module

    run_workers(step_once, 3, 1e-4)                   # [result of rank 0, of rank 1, of rank 2]
    run_workers(step_once, 3, 1e-4, outcomes=True)    # the same, with the exception object of each
    rank that raised

Starting an interpreter and importing torch takes seconds, so workers are forks of one server
process that has imported it already. The server is started by the first launch and ends with the
parent. A worker that did its work and left nothing behind waits for more: it can be any rank of a
later call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rank_process import GO, STAY, Answer, Job, work

COVERAGE_VARIABLE = "DISTLION_TEST_COVERAGE"
"""JSON of the arguments for coverage, where the parent measures it; harness.py sets it."""

RELEASE_AFTER_FAILURE_S = 2.0
"""Without ``outcomes``: the time that others have to fail too before a failed rank is let go."""

DIED = "died without an answer"

# torch._dynamo is imported by the first optimizer that is made, and takes a second.
PRELOAD = [
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "distlion",
    "distlion.crew",
]

_MODELS = ["transformers.models.gpt2.modeling_gpt2", "transformers.models.vit.modeling_vit"]
_SHARDS = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "fsspec"]
_TRAINERS = ["accelerate", "sklearn.datasets", "transformers.trainer"]
PRELOAD_FOR = {
    "test_machines.py": _SHARDS,
    "test_machines_refused.py": _SHARDS,
    "distributed": _SHARDS,
    "integrations": _TRAINERS,
    "lab": ["distlion_lab.training.run", "sklearn.datasets"],
    # What only slow tests, and those around the library, need.
    "slow": ["lightning", *_MODELS],
    "around": _MODELS,
}
"""Further modules for tests in these folders or files, or with these marks; they double the time of
the start."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def start_server(folders: Collection[str] = ()) -> None:
    """Start the server, unless it runs: everything that this process forks later comes from it.

    Args:
        folders: Names of folders below tests, of files, and of marks of tests that will run.
    """
    more = [name for folder in PRELOAD_FOR if folder in folders for name in PRELOAD_FOR[folder]]
    _context.set_forkserver_preload([*PRELOAD, *more])
    forkserver.ensure_running()


class WorkersFailedError(AssertionError):
    """At least one rank raised, died or was killed; the text holds what happened on every rank."""


class WorkerDiedError(Exception):
    """A rank ended without an answer."""


@dataclass
class _Worker:
    """A process of which this one holds the other end of the pipe."""

    process: BaseProcess
    connection: Connection


_idle: list[_Worker] = []
"""Living workers that left nothing behind and wait for a job; each can be any rank."""

left_behind: list[str] = []
"""Leftovers of the workers that were replaced because of them, one text for each worker."""


def run_workers(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    outcomes: bool = False,
    may_die: bool = False,
    process_group: bool = True,
    environment: dict[str, str] | None = None,
    measured: bool = True,
    fresh: bool = False,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` processes.

    They are those of an earlier call, unless something may happen to them: with ``outcomes``,
    ``may_die``, ``environment`` or ``fresh``, and without a process group, each is new and ends
    with the call.

    Args:
        function: A function at the top level of an importable file. It runs with one torch thread
            and, unless ``process_group`` is False, with an initialized Gloo group over the loopback
            interface.
        world_size: Number of processes.
        args: Picklable arguments.
        timeout_s: After this time all processes are killed and the call fails.
        outcomes: Return, for each rank, its result or the exception that it raised, instead of
            failing.
        may_die: As ``outcomes``, and a rank that was killed has a WorkerDiedError for its outcome.
        process_group: Whether to initialize the default group before ``function``.
        environment: Variables set in every worker before ``function``.
        measured: Whether workers measure coverage where the parent does. It doubles the time of
            long runs, which cover nothing that short ones do not.
        fresh: Whether the processes must not have run anything before.

    Returns:
        One item for each rank, in rank order.

    Raises:
        WorkersFailedError: A rank raised (without ``outcomes``), or died, or the time was over.
    """
    fresh = fresh or outcomes or may_die or bool(environment) or not process_group
    workers: list[_Worker] = []
    kept: list[_Worker] = []
    try:
        with tempfile.TemporaryDirectory(prefix="distlion-test-") as folder:
            init_file = os.path.join(folder, "rendezvous") if process_group else None
            for rank in range(world_size):
                workers.append(_start_worker() if fresh else _take_worker())
                job = _make_job(
                    function, args, rank, world_size, init_file, environment or {}, measured
                )
                workers[rank].connection.send_bytes(pickle.dumps(job))
            connections = [worker.connection for worker in workers]
            deadline = time.monotonic() + timeout_s
            answers = _collect(
                connections, timeout_s, deadline, release_failed=not (outcomes or may_die)
            )
            may_stay = not fresh and all(
                isinstance(answer, Answer) and answer.ok for answer in answers
            )
            kept = _dismiss(workers, answers, deadline, may_stay=may_stay)
    finally:
        _end([worker for worker in workers if worker not in kept])
    _idle.extend(kept)
    if not all(_is_wanted(answer, outcomes, may_die) for answer in answers):
        raise WorkersFailedError(_describe(answers))
    return [_read(answer) for answer in answers]


def _start_worker() -> _Worker:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _take_worker() -> _Worker:
    """Return a worker that waits for a job, or a new one."""
    while _idle:
        worker = _idle.pop()
        if worker.process.is_alive():
            return worker
        _end([worker])
    return _start_worker()


def _dismiss(
    workers: list[_Worker], answers: list[Answer | str], deadline: float, *, may_stay: bool
) -> list[_Worker]:
    """Let ranks that answered go, or stay; return those that left nothing behind."""
    _let_go(
        [
            worker.connection
            for worker, answer in zip(workers, answers, strict=True)
            if answer == DIED or isinstance(answer, Answer)
        ],
        STAY if may_stay else GO,
    )
    kept = []
    for worker in workers:
        # Until a reply, or until the sockets of the rank are closed and its coverage is written.
        with contextlib.suppress(EOFError, OSError):
            if worker.connection.poll(max(0.0, min(10.0, deadline - time.monotonic()))):
                found = worker.connection.recv_bytes().decode()
                if found:
                    left_behind.append(f"{worker.process.pid}: {found}")
                else:
                    kept.append(worker)
    return kept


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()


def _is_wanted(answer: Answer | str, outcomes: bool, may_die: bool) -> bool:
    if isinstance(answer, str):
        return may_die and answer == DIED
    return answer.ok or outcomes or may_die


def _read(answer: Answer | str) -> Any:
    if isinstance(answer, str):
        return WorkerDiedError(answer)
    return answer.value if answer.ok else _revive(answer)


def _make_job(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    init_file: str | None,
    environment: dict[str, str],
    measured: bool,
) -> Job:
    module = sys.modules[function.__module__]
    assert module.__file__ is not None
    return Job(
        module_name=function.__module__,
        module_path=module.__file__,
        qualified_name=function.__qualname__,
        payload=pickle.dumps(args),
        rank=rank,
        world_size=world_size,
        init_file=init_file,
        environment=environment,
        directory=os.getcwd(),
        path=sys.path,
        coverage=os.environ.get(COVERAGE_VARIABLE) if measured else None,
    )


def _collect(
    connections: list[Connection], timeout_s: float, deadline: float, *, release_failed: bool
) -> list[Answer | str]:
    """Wait for all answers; a rank without one is described by a string."""
    answers: list[Answer | str] = [f"no answer within {timeout_s} s: killed"] * len(connections)
    pending = dict(enumerate(connections))
    failed: list[Connection] = []
    release_at = float("inf")
    while pending:
        now = time.monotonic()
        if now >= deadline:
            break
        if now >= release_at:
            # A peer of a rank that raised would wait for it until its own timeout: let that rank
            # go.
            _let_go(failed)
            failed, release_at = [], float("inf")
        ready = wait(list(pending.values()), timeout=min(deadline, release_at) - now)
        for rank, connection in list(pending.items()):
            if connection not in ready:
                continue
            del pending[rank]
            try:
                answers[rank] = answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                answers[rank] = DIED
                continue
            if not answer.ok and release_failed:
                failed.append(connection)
                release_at = min(release_at, time.monotonic() + RELEASE_AFTER_FAILURE_S)
    return answers


def _let_go(connections: list[Connection], order: bytes = GO) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(order)


def _describe(answers: list[Answer | str]) -> str:
    parts = []
    for rank, answer in enumerate(answers):
        text = answer if isinstance(answer, str) else ("ok" if answer.ok else answer.error_text)
        parts.append(f"--- rank {rank}: {text}")
    return "workers failed\n" + "\n".join(parts)


def _revive(answer: Answer) -> BaseException:
    """Return the exception of a rank with its traceback as a note."""
    assert answer.error is not None
    error: BaseException = pickle.loads(answer.error)
    if sys.version_info >= (3, 11):
        error.add_note(answer.error_text)
    return error
