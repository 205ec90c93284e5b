"""``distlion crew``: run the store through which workers meet, and show the members."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore

from distlion.command_line import Parser, read_whole
from distlion.crew.memory import NOW
from distlion.crew.store import (
    DEFAULT_PORT,
    MEMBERS_FIRST,
    MOST_PORTS,
    TRAINED,
    name_run,
    start_store,
)
from distlion.errors import InvalidArgumentError

_LOOK_S = 0.5
MEMBERS_FIRST_S = 60
"""Seconds for members to come back; they try every few seconds."""


def read_port(text: str) -> int:
    """Return the number of a port; 0 for any free one."""
    port = read_whole(text)
    if port > MOST_PORTS:
        raise argparse.ArgumentTypeError(f"{port} is not a port: expected {MOST_PORTS} at most")
    return port


def make_parser() -> Parser:
    """Make the parser of the command."""
    parser = Parser(
        prog="distlion crew",
        description="Run the store through which the workers of a crew meet, until Ctrl-C. If it "
        "is lost, members train on, and come back to the next one at the same name and port. Each "
        "change of members prints a line. The store listens on all interfaces: let only the "
        "workers reach the port.",
        epilog="Example: distlion crew --port 29400 --state /var/lib/crew/trained",
    )
    parser.add_argument(
        "--port",
        type=read_port,
        default=DEFAULT_PORT,
        help="Port of the store (default: %(default)s).",
    )
    parser.add_argument(
        "--run-id", default="run", help="Run whose members are shown (default: %(default)s)."
    )
    parser.add_argument(
        "--members-first",
        type=read_whole,
        nargs="?",
        const=MEMBERS_FIRST_S,
        default=0,
        metavar="SECONDS",
        help="For a store that is started again, empty, while a crew trains: newcomers wait until "
        f"its members are back, or for this long ({MEMBERS_FIRST_S} without a number).",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="File that is made once a crew has trained. A store that finds it was started again, "
        "and lets members come back first.",
    )
    return parser


def run(arguments: Sequence[str]) -> None:
    """Run the store until Ctrl-C, and print each change of members.

    Raises:
        CrewError: The port is taken.
        InvalidArgumentError: The file of the state cannot be one.
    """
    asked = make_parser().parse_args(arguments[1:])
    if asked.state is not None:
        _prepare(asked.state)
    is_known = asked.state is None or asked.state.exists()
    first_s = asked.members_first
    if asked.state is not None and is_known:
        first_s = first_s or MEMBERS_FIRST_S
    store = start_store(asked.port)
    if first_s:
        store.set(MEMBERS_FIRST, "")
        _print(f"newcomers wait for members that come back, for {first_s} s at most")
    until_s = time.monotonic() + first_s
    _print(f"the store listens at port {store.port}; members of {asked.run_id!r} follow")
    members, shown = PrefixStore(name_run(asked.run_id), store), b""
    with suppress(KeyboardInterrupt):
        while True:
            if members.check([NOW]) and (now := members.get(NOW)) != shown:
                _print(now.decode())
                shown = now
            if first_s and time.monotonic() > until_s:
                store.delete_key(MEMBERS_FIRST)
                first_s = 0
            if not is_known and store.check([TRAINED]):
                is_known = True
                _note(asked.state)
            time.sleep(_LOOK_S)
    _print("the store has ended")


def _prepare(state: Path) -> None:
    """See that the file of the state can be made."""
    wanted = f"--state {state}: expected a file in a folder that can be written"
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        is_other = state.exists() and not state.is_file()
    except OSError as error:
        raise InvalidArgumentError(f"{wanted} ({error})") from error
    if is_other:
        raise InvalidArgumentError(f"{wanted}, and it is none")
    if not os.access(state.parent, os.W_OK):
        raise InvalidArgumentError(wanted)


def _note(state: Path) -> None:
    """Note that a crew has trained."""
    try:
        state.touch()
    except OSError as error:  # members need the store more than the file
        _print(f"--state {state} was not made ({error}); start the next store with --members-first")


def _print(line: str) -> None:
    # At once, also into a file or a pipe.
    print(line, flush=True)
