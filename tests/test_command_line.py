"""The command line: own commands, those that other packages bring, and errors in one line."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import distlion
from distlion import __main__ as program
from distlion.command_line import FAILED, INTERRUPTED, MISUSED, shown_failures
from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError
from forked_programs import Programs

RAN: list[list[str]] = []


def run_greeting(arguments: list[str]) -> None:
    RAN.append(arguments)
    print("hello", arguments[-1])


@pytest.fixture
def greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the package of this test brings a command: ``greet``."""
    point = EntryPoint("greet", f"{__name__}:run_greeting", program.GROUP)
    monkeypatch.setattr(program, "entry_points", lambda group: [point])
    RAN.clear()


def end(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Return the exit status of a command line."""
    monkeypatch.setattr(sys, "argv", ["distlion", *words])
    try:
        program.main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.slow
def test_module_runs_the_command_line() -> None:
    command = [sys.executable, "-m", "distlion", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"distlion {distlion.__version__}\n"


def test_own_commands_need_no_optional_package(programs: Programs, tmp_path: Path) -> None:
    blocked = ("typer", "rich", "transformers", "datasets", "sklearn", "matplotlib", "distlion_lab")
    code = "import sys; sys.modules.update(dict.fromkeys({}))\nsys.argv[1:] = {}\n{}".format(
        blocked, ["{}", "--help"], "from distlion.__main__ import main; main()"
    )
    for name in ("crew", "checkpoint"):
        ended = programs.run(code.replace("{}", name), tmp_path)
        assert ended.status == 0, ended.text
        assert ended.text.startswith(f"usage: distlion {name}")


@pytest.mark.usefixtures("greeting")
def test_a_command_of_another_package_gets_all_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(monkeypatch, "greet", "--loudly", "you") == 0
    assert RAN == [["greet", "--loudly", "you"]]
    assert end(monkeypatch, "--help") == 0
    assert "greet" in capsys.readouterr().out


@pytest.mark.usefixtures("greeting")
def test_output_in_ascii_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert end(monkeypatch, "greet", "Zoë") == 0
    assert shown.getvalue() == b"hello Zo\\xeb\n"


@pytest.mark.usefixtures("greeting")
@pytest.mark.parametrize(("name", "extra"), [("train", "train"), ("netlab", "netlab")])
def test_an_absent_command_names_what_brings_it(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(monkeypatch, name) == FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f'pip install "distlion[{extra}]"')
    assert end(monkeypatch, "--help") == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert f"distlion[{extra}]" in shown[name]
    assert "pip" not in shown["crew"]


def test_a_command_that_does_not_exist_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(monkeypatch, "chekpoint") == MISUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean checkpoint?" in line


def test_no_command_shows_the_commands_and_is_misuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(monkeypatch) == MISUSED
    assert "checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("checkpoint", "COMMAND"),
        ("checkpoint verify", "path"),
        ("checkpoint verify --jsn x", "--jsn"),
        ("checkpoint delete x", "delete"),
        ("crew --port 1_0", "--port"),
        ("crew --por 1", "--por"),
    ],
)
def test_misuse_is_one_line_with_the_name_of_the_option(
    words: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(monkeypatch, *words.split()) == MISUSED
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert (line.startswith("distlion: "), shown.out) == (True, "")
    assert named in line


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (InvalidArgumentError("lr is -1"), MISUSED, "distlion: lr is -1\n"),
        (DataError("no file"), FAILED, "distlion: DataError: no file\n"),
        (KeyboardInterrupt(), INTERRUPTED, "distlion: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, shown_failures():
        raise error
    assert (ended.value.code, capsys.readouterr().err) == (status, shown)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(OSError, match="a bug"), shown_failures():
        raise OSError("a bug")


@pytest.mark.parametrize("words", ["--help", "--version", "checkpoint --help"])
def test_full_disk_is_one_line_and_status_1(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert end(monkeypatch, *words.split()) == FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "distlion: standard output cannot be written: No space left on device"


HELP_FOR_NOBODY = """
import os, sys
read_end, write_end = os.pipe()
os.close(read_end)
os.dup2(write_end, 1)
sys.argv[1:] = ["--help"]
from distlion.__main__ import main
main()
"""


def test_reader_that_has_gone_is_told_nothing(programs: Programs, tmp_path: Path) -> None:
    ended = programs.start(HELP_FOR_NOBODY, tmp_path).end()
    assert (ended.status, ended.errors) == (FAILED, "")


@pytest.mark.parametrize(("words", "status"), [("--help", 0), ("checkpoint --help", 0), ("x", 2)])
def test_streams_that_the_caller_has_closed_change_no_status(
    words: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert end(monkeypatch, *words.split()) == status
