"""The commands and their common options."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from distlion import __version__
from distlion.lab.cli.checkpoint import checkpoint_app
from distlion.lab.cli.command import Command, Group
from distlion.lab.cli.compare import EXAMPLE as COMPARE_EXAMPLE
from distlion.lab.cli.compare import compare_command
from distlion.lab.cli.crew import EXAMPLE as CREW_EXAMPLE
from distlion.lab.cli.crew import crew_command
from distlion.lab.cli.doctor import EXAMPLE as DOCTOR_EXAMPLE
from distlion.lab.cli.doctor import doctor_command
from distlion.lab.cli.netlab import netlab_app
from distlion.lab.cli.plan import EXAMPLE as PLAN_EXAMPLE
from distlion.lab.cli.plan import plan_command
from distlion.lab.cli.train import EXAMPLE, train_command

app = typer.Typer(
    name="distlion",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=Command, epilog=EXAMPLE)(train_command)
app.command("compare", cls=Command, epilog=COMPARE_EXAMPLE)(compare_command)
app.command("plan", cls=Command, epilog=PLAN_EXAMPLE)(plan_command)
app.command("doctor", cls=Command, epilog=DOCTOR_EXAMPLE)(doctor_command)
app.command("crew", cls=Command, epilog=CREW_EXAMPLE)(crew_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(netlab_app, name="netlab")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"distlion {__version__}")
        raise typer.Exit


@app.callback()
def distlion(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train with workers that vote: one bit per parameter and step instead of full gradients."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may have characters outside the stream's encoding, such as ASCII.
            stream.reconfigure(errors="backslashreplace")
