"""A signal at any moment in which processes are started, or ended, leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import popen_forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from distlion_lab.training.local_workers import run_workers
from distlion_lab.training.pool import Pool
from signals import hear_ctrl_c
from tiers import in_tiers

pytestmark = pytest.mark.distributed

RAISED = {signal.SIGINT: None, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Exit statuses of the SystemExit that is raised; None for KeyboardInterrupt."""


@pytest.fixture(autouse=True)
def hears_signals() -> Iterator[None]:
    """Let SIGINT raise and SIGHUP be heard, also where ``&`` or nohup has tests ignore them."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt_start(monkeypatch: pytest.MonkeyPatch, number: int, place: int) -> list[int]:
    """Raise a signal when a process runs and its number is not yet known; return all numbers."""
    launch, started = popen_forkserver.Popen._launch, []

    def interrupted(popen: Any, process: BaseProcess) -> None:
        launch(popen, process)
        started.append(popen.pid)
        if len(started) == place:
            signal.raise_signal(number)

    monkeypatch.setattr(popen_forkserver.Popen, "_launch", interrupted)
    return started


def interrupt_end(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Raise a signal when the first process is being ended; return all numbers."""
    terminate, ended = BaseProcess.terminate, []

    def interrupted(process: BaseProcess) -> None:
        ended.append(process.pid or 0)
        if len(ended) == 1:
            signal.raise_signal(number)
        terminate(process)

    monkeypatch.setattr(BaseProcess, "terminate", interrupted)
    return ended


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_raised(raised: pytest.ExceptionInfo[BaseException], number: int) -> None:
    if RAISED[number] is None:
        assert raised.type is KeyboardInterrupt
    else:
        assert isinstance(raised.value, SystemExit)
        assert raised.value.code == RAISED[number]


def wait(emit: Any, *args: Any) -> None:
    emit("ready")
    time.sleep(600)


def ignore(event: object) -> None:
    pass


def stop(event: object) -> None:
    raise KeyboardInterrupt


def run_local(observe: Any = ignore) -> None:
    run_workers(wait, world_size=2, observe=observe)


def run_pool() -> None:
    with Pool(wait, size=2) as pool:
        pool.submit("a")
        pool.submit("b")
        list(pool.events())


each_signal = pytest.mark.parametrize(
    "number", in_tiers(RAISED, lambda number: number != signal.SIGINT)
)


@each_signal
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("run", [run_local, run_pool])
def test_a_start_that_is_interrupted_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, number: int, place: int, run: Any
) -> None:
    started = interrupt_start(monkeypatch, number, place)
    with pytest.raises(BaseException) as raised:
        run()
    assert_raised(raised, number)
    assert len(started) == place
    assert not any(map(is_running, started))
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@each_signal
def test_an_end_that_is_interrupted_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ended = interrupt_end(monkeypatch, number)
    with pytest.raises(BaseException) as raised:
        run_local(stop)
    assert_raised(raised, number)
    assert len(ended) == 2
    assert not any(map(is_running, ended))


SCRIPT = """
import os
from multiprocessing import popen_forkserver
launch = popen_forkserver.Popen._launch
def interrupted(popen, process):
    popen_forkserver.Popen._launch = launch
    launch(popen, process)
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
popen_forkserver.Popen._launch = interrupted
from distlion.__main__ import main
main()
"""
COMMANDS = {
    "train": ["--task", "images", "--workers", "2", "--steps", "1000000", "--batch-size", "1"],
    "compare": ["--quick", "--workers", "2", "--jobs", "2"],
}
FOLDERS = {"train": "--run-dir", "compare": "--out"}


@pytest.mark.parametrize(
    ("command", "number"),
    in_tiers(
        [(command, number) for command in COMMANDS for number in RAISED],
        lambda case: case == ("train", signal.SIGINT),
    ),
)
def test_a_command_that_is_interrupted_while_it_starts_ends_with_all_its_processes(
    command: str, number: int, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", SCRIPT, command, *COMMANDS[command]),
            *(FOLDERS[command], str(tmp_path / "out")),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"NUMBER": str(int(number)), "TMPDIR": str(tmp_path)},
        start_new_session=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509
    )
    # Every process holds the other end of this pipe: it ends when the last of them has.
    errors = process.communicate(timeout=240)[1]
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert ("all workers have ended" in errors) == (number == signal.SIGINT)
    assert not list(tmp_path.glob("distlion-*"))
