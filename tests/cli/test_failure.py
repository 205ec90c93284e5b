import io
import pickle

import pytest
import typer
from rich.console import Console

from distlion.cli.failure import shown_failures
from distlion.errors import DataError, WorkerFailedError


def show(error, *, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with pytest.raises(typer.Exit) as raised, shown_failures(console):
        raise error
    return raised.value.exit_code, console.file.getvalue()


def test_typed_error_is_one_line_with_status_1():
    assert show(DataError("no [such] file")) == (1, "distlion: DataError: no [such] file\n")


def test_typed_error_is_framed_on_a_terminal():
    status, shown = show(DataError("no file"), terminal=True)
    assert status == 1
    assert "╭" in shown


def test_interruption_has_status_130():
    assert show(KeyboardInterrupt())[0] == 130


def test_traceback_of_a_broken_worker_is_shown_first():
    error = WorkerFailedError("worker 1 failed")
    error.__cause__ = RuntimeError("Traceback of worker 1")
    assert show(error)[1].startswith("Traceback of worker 1\n")


@pytest.mark.parametrize("cause", [OSError("errno 2"), pickle.UnpicklingError("errno 2")])
def test_cause_that_the_message_already_tells_is_not_shown(cause):
    error = DataError("cannot be read")
    error.__cause__ = cause
    assert "errno" not in show(error)[1]


def test_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), shown_failures(Console(file=io.StringIO())):
        raise ZeroDivisionError
