import io
import pickle

import pytest
import typer
from rich.console import Console

from distlion.errors import InvalidArgumentError, NonFiniteError, PeerLostError, StepTimeoutError
from distlion_lab.cli.failure import named_options, shown_failures
from distlion_lab.errors import DataError, WorkerFailedError


def show(error, *, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with pytest.raises(typer.Exit) as raised, shown_failures(console):
        raise error
    return raised.value.exit_code, console.file.getvalue()


def test_typed_error_is_one_line_with_status_1():
    assert show(DataError("no [such] file")) == (1, "distlion: DataError: no [such] file\n")


def test_error_longer_than_a_terminal_is_one_line_of_it_too():
    status, shown = show(DataError("no file " * 50), terminal=True)
    assert status == 1
    assert shown.count("\n") == 1


def test_error_has_no_color_where_none_is_wanted(monkeypatch):
    assert "\x1b[31m" in show(DataError("no file"), terminal=True)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in show(DataError("no file"), terminal=True)[1]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("compute_s is 0.0, expected more", "--compute-s is 0.0, expected more"),
        ("rate 'fast': expected", "--rate 'fast': expected"),
        ("n_params is 0", "--params is 0"),
        ("LinkModel(latency_s=-1): expected", "--latency-us: LinkModel(latency_s=-1): expected"),
        ("there is no command to run", "there is no command to run"),
    ],
)
def test_refusal_names_the_option_and_not_the_argument(message, shown):
    names = {
        "compute_s": "--compute-s",
        "rate": "--rate",
        "params": "--params",
        "latency_us": "--latency-us",
    }
    with named_options(names):
        assert show(InvalidArgumentError(message)) == (2, f"distlion: {shown}\n")


def show_on(rank, error, monkeypatch, *, local_rank=None):
    world = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank}
    for name, value in world.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    return show(error)[1] != ""


@pytest.mark.parametrize(
    ("error", "tellers"),
    [
        (StepTimeoutError("nobody knows who", rank=0), [0, 1, 2]),
        (NonFiniteError("of rank 2", rank=0, culprits=(2,)), [0]),
        (PeerLostError("rank 2 has gone", rank=0, culprits=(2,)), [0]),
        (PeerLostError("rank 0 has gone", rank=0, culprits=(0,)), [0, 1]),
        # What one rank alone may know.
        (DataError("no file on this host"), [0, 1, 2]),
    ],
)
def test_what_all_ranks_know_is_told_by_the_first_that_is_left(error, tellers, monkeypatch):
    assert [rank for rank in range(3) if show_on(rank, error, monkeypatch)] == tellers


@pytest.mark.parametrize(
    ("local_ranks", "tellers"),
    [([0, 1, 0, 1], [0, 2]), ([0, 1, 2, 3], [0]), ([None] * 4, [0])],
    ids=["two hosts", "one host", "a launcher without LOCAL_RANK"],
)
def test_a_refusal_is_told_once_on_each_host(local_ranks, tellers, monkeypatch):
    error = InvalidArgumentError("GLOO_SOCKET_IFNAME=eth9: there is no such interface")
    told = [
        rank
        for rank, local_rank in enumerate(local_ranks)
        if show_on(rank, error, monkeypatch, local_rank=local_rank)
    ]
    assert told == tellers


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
