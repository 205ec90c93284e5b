"""The worker process of tests/cluster.py: it runs one function after the other, as the rank asked.

A process answers each job and then waits. Told GO it ends; told STAY it destroys its process
groups, resets what it can, and replies with what the function has left behind, if anything.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from leftovers import State, drop_test_modules

GO = b"go"
STAY = b"stay"

PROBE = {"_FIRST_BYTES": 1024, "MAX_CHUNK_BYTES": 1024, "TINY_TRIES": 2, "TRIES": 1}
"""A short probe of the link: an optimizer that measures costs most of its start otherwise."""


@dataclass(frozen=True)
class Answer:
    """The answer of one rank; ``error`` is pickled separately, because pickling it can fail."""

    ok: bool
    value: Any
    error: bytes | None = None
    error_text: str = ""


@dataclass(frozen=True)
class Job:
    """The task of one rank; ``payload`` is unpickled only after the test module is imported."""

    module_name: str
    module_path: str
    qualified_name: str
    payload: bytes
    rank: int
    world_size: int
    init_file: str | None
    environment: dict[str, str]
    directory: str
    path: list[str]
    coverage: str | None


def work(connection: Connection) -> None:
    """Do jobs until told to go. After an answer, stay: leaving early would break the peers."""
    # Control-C reaches the whole foreground group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the server has imported lives as long as this process: collections need not look at it.
    gc.freeze()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    with contextlib.suppress(EOFError, OSError):
        _shorten_probe()
        state = State()
        while True:
            job = pickle.loads(connection.recv_bytes())
            with _measured(job.coverage):
                answer = _answer(job, state)
                # An optimizer in a cycle, as of an error and its traceback, lets go of its peers.
                gc.collect()
                with contextlib.suppress(OSError):
                    connection.send_bytes(answer)
            if connection.recv_bytes() != STAY:
                break
            connection.send_bytes(_clear(state).encode())
    # Destructors of a broken process group may abort or wait.
    os._exit(0)


def _answer(job: Job, state: State) -> bytes:
    try:
        os.environ.update(job.environment)
        os.chdir(job.directory)
        sys.path[:] = job.path
        function = _load(job)
        args = pickle.loads(job.payload)
        state.watch_modules()
        _prepare_torch(job)
        return pickle.dumps(Answer(True, function(job.rank, job.world_size, *args)))
    except BaseException as error:
        return pickle.dumps(
            Answer(False, None, _pickle_error(error), "".join(traceback.format_exception(error)))
        )


def _clear(state: State) -> str:
    """Forget the last job; return what it left behind."""
    import torch.distributed as dist

    drop_test_modules()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    return state.restore()


def _shorten_probe() -> None:
    from distlion.wire import probe

    for name, value in PROBE.items():
        assert hasattr(probe, name)
        setattr(probe, name, value)


def _prepare_torch(job: Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job.init_file is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{job.init_file}", rank=job.rank, world_size=job.world_size
        )


def _load(job: Job) -> Callable[..., Any]:
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
