"""``distlion crew``: run the store through which workers meet, and show the members."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from torch.distributed.distributed_c10d import PrefixStore

from distlion.crew import DEFAULT_PORT, NOW, name_run, start_store
from distlion.lab.cli.failure import shown_failures
from distlion.lab.cli.quantity import whole_option

EXAMPLE = "Example: distlion crew --port 29400"
_LOOK_S = 0.5

_Port = Annotated[int, whole_option(help="Port of the store.")]
_Run = Annotated[str, typer.Option(help="Run whose members are shown.")]


def crew_command(*, port: _Port = DEFAULT_PORT, run_id: _Run = "run") -> None:
    """Run the store through which the workers of a crew meet, until Ctrl-C.

    It must live as long as the run. Each change of members prints a line. The store listens on
    all interfaces: let only the workers reach the port.
    """
    console = Console()
    with shown_failures(Console(stderr=True)):
        store = start_store(port)
        console.print(f"the store listens at port {store.port}; members of {run_id!r} follow")
        members, shown = PrefixStore(name_run(run_id), store), b""
        with suppress(KeyboardInterrupt):
            while True:
                if members.check([NOW]) and (now := members.get(NOW)) != shown:
                    console.print(now.decode(), highlight=False, soft_wrap=True)
                    shown = now
                time.sleep(_LOOK_S)
        console.print("the store has ended")
