"""``distlion crew``: a store that was started again lets members come back first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distlion.command_line import MISUSED
from distlion.crew import command
from distlion.crew.store import MEMBERS_FIRST, TRAINED
from distlion.errors import InvalidArgumentError


class Kept(dist.HashStore):  # type: ignore[name-defined,misc]
    """The store of the command."""

    port = 29400


class Clock:
    """The time of the command; after two pauses comes Ctrl-C.

    Args:
        look: Called in each pause.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._n_pauses, self._now_s = look, 0, 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if self._n_pauses == 2:
            raise KeyboardInterrupt
        self._look()
        self._n_pauses, self._now_s = self._n_pauses + 1, self._now_s + 61


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the store that the command keeps."""
    made = Kept()
    monkeypatch.setattr(command, "start_store", lambda port: made)
    return made


def test_first_start_keeps_nobody_waiting_and_notes_that_a_crew_has_trained(
    kept: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state, seen = tmp_path / "trained", []

    def look() -> None:
        seen.append((kept.check([MEMBERS_FIRST]), state.exists()))
        kept.set(TRAINED, "")

    monkeypatch.setattr(command, "time", Clock(look))
    command.run(["crew", "--state", str(state)])
    assert seen == [(False, False), (False, True)]


def test_folder_of_the_state_is_made_and_a_store_outlives_its_loss(
    kept: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "yet"

    def look() -> None:
        if folder.exists():
            folder.rmdir()
        kept.set(TRAINED, "")

    monkeypatch.setattr(command, "time", Clock(look))
    command.run(["crew", "--state", str(folder / "trained")])
    said = capsys.readouterr().out
    assert said.count("was not made") == 1
    assert "the store has ended" in said


@pytest.mark.parametrize("name", ["", ".", "file/trained", "/dev/null"])
def test_what_cannot_be_the_file_of_the_state_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "start_store", lambda port: pytest.fail("it was started"))
    with pytest.raises(InvalidArgumentError, match="expected a file in a folder"):
        command.run(["crew", "--state", name])


def test_a_port_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run(["crew", "--port", "65536"])
    assert caught.value.code == MISUSED
    assert "65536 is not a port" in capsys.readouterr().err


@pytest.mark.parametrize("is_marked", [True, False], ids=["by hand", "by the file"])
def test_second_start_lets_members_come_back_first_for_a_minute(
    kept: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_marked: bool
) -> None:
    state, seen = tmp_path / "trained", []
    state.touch()
    monkeypatch.setattr(command, "time", Clock(lambda: seen.append(kept.check([MEMBERS_FIRST]))))
    command.run(["crew", *(["--members-first"] if is_marked else ["--state", str(state)])])
    assert seen == [True, False]
