"""``distlion crew``: run the store through which workers meet, and show the members."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore

from distlion.command_line import Parser, read_whole
from distlion.crew.store import DEFAULT_PORT, NOW, name_run, start_store

_LOOK_S = 0.5


def make_parser() -> Parser:
    """Make the parser of the command."""
    parser = Parser(
        prog="distlion crew",
        description="Run the store through which the workers of a crew meet, until Ctrl-C. It must "
        "live as long as the run. Each change of members prints a line. The store listens on all "
        "interfaces: let only the workers reach the port.",
        epilog="Example: distlion crew --port 29400",
    )
    parser.add_argument(
        "--port",
        type=read_whole,
        default=DEFAULT_PORT,
        help="Port of the store (default: %(default)s).",
    )
    parser.add_argument(
        "--run-id", default="run", help="Run whose members are shown (default: %(default)s)."
    )
    return parser


def run(arguments: Sequence[str]) -> None:
    """Run the store until Ctrl-C, and print each change of members.

    Raises:
        CrewError: The port is taken.
    """
    asked = make_parser().parse_args(arguments[1:])
    store = start_store(asked.port)
    _print(f"the store listens at port {store.port}; members of {asked.run_id!r} follow")
    members, shown = PrefixStore(name_run(asked.run_id), store), b""
    with suppress(KeyboardInterrupt):
        while True:
            if members.check([NOW]) and (now := members.get(NOW)) != shown:
                _print(now.decode())
                shown = now
            time.sleep(_LOOK_S)
    _print("the store has ended")


def _print(line: str) -> None:
    # At once, also into a file or a pipe.
    print(line, flush=True)
