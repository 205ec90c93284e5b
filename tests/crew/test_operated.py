"""The worker's script of the page for operators, as processes that end and start again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from crews import await_true, host_store
from forked_programs import Ended, Program, Programs
from test_docs import ROOT, read_blocks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PAGE = ROOT / "docs/how-to/operate-a-crew.md"
N, STEPS, SAVED_EVERY = 3, 6, 2


def read_script(folder: Path, *, steps: int = STEPS, saved_every: int = SAVED_EVERY) -> str:
    """Return the script, with its steps and a folder of the test."""
    (script,) = [each.code for each in read_blocks([PAGE]) if "distlion.Crew(" in each.code]
    for before, after in (
        ("10_000", str(steps)),
        ("% 200", f"% {saved_every}"),
        ("/shared/run", str(folder)),
    ):
        assert script.count(before) == 1
        script = script.replace(before, after)
    return script


def describe_environment(port: int) -> dict[str, str]:
    return {
        "CREW_STORE": f"127.0.0.1:{port}",
        "DISTLION_CREW_SECRET": "of this test",
        "OMP_NUM_THREADS": "1",
    }


def run_workers(programs: Programs, folder: Path, cwd: Path) -> list[Ended]:
    """Run all workers with a store of their own, until each has ended."""
    store = host_store()
    environment = describe_environment(store.port)
    started = [programs.start(read_script(folder), cwd, **environment) for _ in range(N)]
    return [each.end() for each in started]


def test_workers_end_at_the_chosen_step_and_go_on_from_there_to_the_end(
    programs: Programs, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done, halt = tmp_path / "run.done", tmp_path / "run.stop"
    halt.write_text(f"{2 * SAVED_EVERY}\n")
    for each in run_workers(programs, folder, tmp_path):
        assert each.status == 0, each.errors
    assert f"{2 * SAVED_EVERY:012d}" in (folder / "latest").read_text()
    assert not done.exists()

    halt.unlink()
    for each in run_workers(programs, folder, tmp_path):
        assert each.status == 0, each.errors
    assert f"{STEPS:012d}" in (folder / "latest").read_text()
    assert done.exists()

    late = programs.run(read_script(folder), tmp_path, CREW_STORE="127.0.0.1:1")
    assert late.status == 0, late.text  # it asks no store


def test_others_train_on_while_workers_are_killed_and_told_to_leave_and_start_again(
    programs: Programs, tmp_path: Path
) -> None:
    store, folder = host_store(), tmp_path / "run"
    script = read_script(folder, steps=10**9, saved_every=100)
    environment = describe_environment(store.port)

    def start() -> Program:
        return programs.start(script, tmp_path, **environment)

    def await_members(*workers: Program) -> None:
        await_true(lambda: all("INFO epoch " in Path(each.logs[1]).read_text() for each in workers))

    stays, *others = [start() for _ in range(N + 1)]
    await_members(stays, *others)
    for place, number, status in (0, signal.SIGKILL, -signal.SIGKILL), (1, signal.SIGTERM, 1):
        os.kill(others[place].pid, number)
        ended = others[place].end()
        assert ended.status == status, ended.errors
        others[place] = start()
        await_members(others[place])
    await_true((folder / "latest").exists)
    saved = int(re.findall(r"\d{12}", (folder / "latest").read_text())[0])
    (tmp_path / "new.stop").write_text(str(saved + 600))
    (tmp_path / "new.stop").rename(tmp_path / "run.stop")
    for each in [last := stays.end(), *(other.end() for other in others)]:
        assert each.status == 0, each.errors
    assert f"{saved + 600:012d}" in (folder / "latest").read_text()
    assert re.search(r"left: worker \d+ \(connection closed\)", last.errors), last.errors
    assert "(left by itself, SystemExit: SIGTERM: this machine is taken away)" in last.errors


@pytest.mark.root
def test_a_full_disk_ends_workers_only_where_the_last_step_cannot_be_saved(
    programs: Programs, tmp_path: Path, small_disk: Path
) -> None:
    disk = os.statvfs(small_disk)
    (small_disk / "full").write_bytes(bytes(disk.f_bavail * disk.f_frsize))
    for each in run_workers(programs, small_disk / "run", tmp_path):
        assert each.status == 1
        assert each.errors.count("WARNING not saved: ") == STEPS // SAVED_EVERY - 1
        assert "CheckpointError" in each.errors and "No space left on device" in each.errors
    assert not (small_disk / "run.done").exists()
