"""Output that cannot be written is one line, or none where its reader has gone, and no success."""

import os
import subprocess
import sys

import pytest
import typer

from cli.test_doctor import LINKS, WORKER
from distlion_lab.cli import app
from distlion_lab.planning.checkup import Checkup
from distlion_lab.planning.link_probe import LinkProbe
from tiers import in_tiers

PLAN = "plan --params 1e9 --nodes 4 --link 10gbit --compute-s 1"
COMMANDS = [
    "--help",
    PLAN,
    f"{PLAN} --json",
    f"{PLAN} --all",
    "doctor",
    "doctor --json",
]


@pytest.fixture(autouse=True)
def _quick_doctor(monkeypatch):
    checkup = Checkup((WORKER,), LinkProbe(LINKS[0], LINKS[:1]), ())
    monkeypatch.setattr("distlion_lab.cli.doctor.run_workers", lambda *_, **__: checkup)


def end(words):
    with pytest.raises(SystemExit) as raised:
        typer.main.get_command(app).main(words.split(), prog_name="distlion")
    return raised.value.code


@pytest.mark.parametrize("words", COMMANDS)
def test_full_disk_is_one_line_and_status_1(words, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert end(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "distlion: standard output cannot be written: No space left on device"
    assert "Traceback" not in line


@pytest.mark.parametrize("words", in_tiers([PLAN, f"{PLAN} --json"], lambda words: words == PLAN))
def test_reader_that_has_gone_is_told_nothing(words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "distlion", *words.split()]
    with os.fdopen(write_end, "wb") as pipe:
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_full_disk_of_both_streams_is_no_success(monkeypatch):
    with open("/dev/full", "w") as out, open("/dev/full", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert end(PLAN) == 1


def test_what_a_command_does_wrong_itself_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise OSError("a bug")

    monkeypatch.setattr("distlion_lab.cli.plan.advise", fail)
    with pytest.raises(OSError, match="a bug"):
        typer.main.get_command(app).main(PLAN.split())
