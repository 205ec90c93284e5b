"""Output for plain terminals, files and pipes, by processes that have one."""

import os
import pty
import re
import subprocess
import sys

PLAN = ["plan", "--params", "1e9", "--nodes", "16", "--link", "10gbit", "--compute-s", "0.8"]
# Python would otherwise take UTF-8 where the locale is C.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def start(words, *, stdout, **environment):
    command = [sys.executable, "-m", "distlion", *words]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=stdout, stderr=subprocess.STDOUT
    )


def run_in_terminal(words, *, status=0, **environment):
    ours, theirs = pty.openpty()
    process = start(words, stdout=theirs, **{"TERM": "xterm-256color"} | environment)
    os.close(theirs)
    shown = b""
    while chunk := read(ours):
        shown += chunk
    os.close(ours)
    assert process.wait() == status
    return shown.decode()


def read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux tells that the last process has closed it
        return b""


def test_output_in_the_c_locale_is_ascii_and_no_character_is_lost():
    process = start([*PLAN, "--all"], stdout=subprocess.PIPE, COLUMNS="40", **ASCII)
    shown, _ = process.communicate()
    assert process.returncode == 0
    assert shown.isascii()
    assert b"?" not in shown
    assert b"\\u" not in shown
    # A pipe is not narrow, and gets no escapes.
    assert b"efficiency" in shown
    assert b"\x1b" not in shown


def test_narrow_terminal_gets_a_narrow_table_and_no_color_where_none_is_wanted():
    shown = run_in_terminal(PLAN, COLUMNS="70", NO_COLOR="1")
    table = shown.split("speed-up")[2].split("left out")[0]
    assert "FullPrecision" in table
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= 70 for line in table.splitlines())
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", shown)


def test_refusal_on_a_terminal_is_one_line():
    shown = run_in_terminal(["plan", "--nodes", "x"], status=2, COLUMNS="40")
    assert len(shown.splitlines()) == 1
    assert "'--nodes'" in shown
