"""Run a function in several real worker processes that share one Gloo process group.

    def step_once(rank, world_size, lr): ...          # a function at the top level of a test module

    run_workers(step_once, 3, 1e-4)                   # [result of rank 0, of rank 1, of rank 2]
    run_workers(step_once, 3, 1e-4, outcomes=True)    # the same, with the exception object of each
    rank that raised

Starting an interpreter and importing torch takes seconds, so workers are forks of one server
process that has imported it already. The server is started by the first launch and ends with the
parent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

COVERAGE_VARIABLE = "DISTLION_TEST_COVERAGE"
"""JSON of the arguments for coverage, where the parent measures it; conftest.py sets it."""

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
    "distlion.lab.training.run",
    "sklearn.datasets",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.vit.modeling_vit",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def start_server() -> None:
    """Start the server, unless it runs: everything that this process forks later comes from it."""
    forkserver.ensure_running()


class WorkersFailedError(AssertionError):
    """At least one rank raised, died or was killed; the text holds what happened on every rank."""


class WorkerDiedError(Exception):
    """A rank ended without an answer."""


@dataclass(frozen=True)
class _Answer:
    """What one rank sends back; ``error`` is pickled apart, as an exception may not survive it."""

    ok: bool
    value: Any
    error: bytes | None = None
    error_text: str = ""


@dataclass(frozen=True)
class _Job:
    """What one rank is told; ``payload`` is unpickled only after the test module is imported."""

    module_name: str
    module_path: str
    qualified_name: str
    payload: bytes
    rank: int
    world_size: int
    init_file: str | None
    environment: dict[str, str]
    coverage: str | None


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
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` new processes.

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

    Returns:
        One item for each rank, in rank order.

    Raises:
        WorkersFailedError: A rank raised (without ``outcomes``), or died, or the time was over.
    """
    with tempfile.TemporaryDirectory(prefix="distlion-test-") as folder:
        init_file = os.path.join(folder, "rendezvous") if process_group else None
        connections, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = _context.Pipe()
                job = _make_job(
                    function, args, rank, world_size, init_file, environment or {}, measured
                )
                process = _context.Process(target=_work, args=(job, theirs), daemon=True)
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            answers = _collect(connections, timeout_s, release_failed=not (outcomes or may_die))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for connection in connections:
                connection.close()
    if not all(_is_wanted(answer, outcomes, may_die) for answer in answers):
        raise WorkersFailedError(_describe(answers))
    return [_read(answer) for answer in answers]


def _is_wanted(answer: _Answer | str, outcomes: bool, may_die: bool) -> bool:
    if isinstance(answer, str):
        return may_die and answer == DIED
    return answer.ok or outcomes or may_die


def _read(answer: _Answer | str) -> Any:
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
) -> _Job:
    module = sys.modules[function.__module__]
    assert module.__file__ is not None
    return _Job(
        module_name=function.__module__,
        module_path=module.__file__,
        qualified_name=function.__qualname__,
        payload=pickle.dumps(args),
        rank=rank,
        world_size=world_size,
        init_file=init_file,
        environment=environment,
        coverage=os.environ.get(COVERAGE_VARIABLE) if measured else None,
    )


def _collect(
    connections: list[Connection], timeout_s: float, *, release_failed: bool
) -> list[_Answer | str]:
    """Wait for all answers; a rank without one is described by a string."""
    deadline = time.monotonic() + timeout_s
    answers: list[_Answer | str] = [f"no answer within {timeout_s} s: killed"] * len(connections)
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
    _let_go([c for rank, c in enumerate(connections) if rank not in pending])
    for connection in connections:
        # Wait until the sockets of the rank are closed and its coverage is written.
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(max(0.0, min(10.0, deadline - time.monotonic()))):
                connection.recv_bytes()
    return answers


def _let_go(connections: list[Connection]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(b"go")


def _describe(answers: list[_Answer | str]) -> str:
    parts = []
    for rank, answer in enumerate(answers):
        text = answer if isinstance(answer, str) else ("ok" if answer.ok else answer.error_text)
        parts.append(f"--- rank {rank}: {text}")
    return "workers failed\n" + "\n".join(parts)


def _revive(answer: _Answer) -> BaseException:
    """Return the exception of a rank with its traceback as a note."""
    assert answer.error is not None
    error: BaseException = pickle.loads(answer.error)
    if sys.version_info >= (3, 11):
        error.add_note(answer.error_text)
    return error


def _work(job: _Job, connection: Connection) -> None:
    """Run one rank, answer, and stay until told to go: leaving early would break the peers."""
    # Control-C reaches the whole foreground group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _measured(job.coverage):
        answer = _answer(job)
        with contextlib.suppress(OSError):
            connection.send_bytes(answer)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    # Destructors of a broken process group may abort or wait.
    os._exit(0)


def _answer(job: _Job) -> bytes:
    try:
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
        os.environ.update(job.environment)
        function = _load(job)
        args = pickle.loads(job.payload)
        _prepare_torch(job)
        return pickle.dumps(_Answer(True, function(job.rank, job.world_size, *args)))
    except BaseException as error:
        return pickle.dumps(
            _Answer(False, None, _pickle_error(error), "".join(traceback.format_exception(error)))
        )


def _prepare_torch(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job.init_file is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{job.init_file}", rank=job.rank, world_size=job.world_size
        )


def _load(job: _Job) -> Callable[..., Any]:
    """Find the function; import its module under the parent's name, whatever the import mode."""
    module = sys.modules.get(job.module_name)
    if module is None:
        tests = str(Path(__file__).resolve().parent)
        if tests not in sys.path:
            sys.path.insert(0, tests)
        spec = importlib.util.spec_from_file_location(job.module_name, job.module_path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for name in job.qualified_name.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an exception with its attributes, without calling its constructor again."""
    state = {}
    for name, value in vars(error).items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            state[name] = value
    try:
        data = pickle.dumps(_Frozen(type(error), tuple(map(_plain, error.args)), state))
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}"))


def _plain(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:
        return repr(value)
    return value


class _Frozen:
    """An exception on its way: unpickles as the exception itself."""

    def __init__(
        self, kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
    ) -> None:
        self.parts = (kind, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unfreeze, self.parts


def _unfreeze(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


@contextlib.contextmanager
def _measured(settings: str | None) -> Iterator[None]:
    """Measure coverage of this process into a file of its own, which pytest-cov combines."""
    if settings is None:
        yield
        return
    import coverage

    measurement = coverage.Coverage(data_suffix=True, **json.loads(settings))
    measurement.start()
    try:
        yield
    finally:
        measurement.stop()
        measurement.save()
