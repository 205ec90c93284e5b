"""The commands and their common options."""

from __future__ import annotations

import typer

from distlion_lab.cli.command import Command, Group
from distlion_lab.cli.compare import EXAMPLE as COMPARE_EXAMPLE
from distlion_lab.cli.compare import compare_command
from distlion_lab.cli.doctor import EXAMPLE as DOCTOR_EXAMPLE
from distlion_lab.cli.doctor import doctor_command
from distlion_lab.cli.plan import EXAMPLE as PLAN_EXAMPLE
from distlion_lab.cli.plan import plan_command
from distlion_lab.cli.train import EXAMPLE, train_command

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


@app.callback()
def distlion() -> None:
    """Train with workers that vote: one bit per parameter and step instead of full gradients."""


def run(arguments: list[str]) -> None:
    """Run a command, the first of the arguments; see ``distlion.__main__``."""
    app(arguments, prog_name="distlion")
