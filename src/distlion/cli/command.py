"""Commands as typer has them, but that refuse in one line and fit into narrow terminals."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from distlion.cli.failure import named_options, show_message

# typer brings a copy of click whose classes have no public name, or uses click itself, by version.
_ClickError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_MISUSED, _ABORTED = 2, 1
# Narrower, the frames that typer draws cut the names of options.
_FRAMED_COLUMNS = 80


class Command(TyperCommand):
    """A command whose errors name its options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = _choose_markup()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with named_options({param.name: param.opts[0] for param in self.params}):
            return super().invoke(ctx)


class Group(TyperGroup):
    """A group of commands that tells what it does not understand in one line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = _choose_markup()
        super().format_help(ctx, formatter)

    def main(self, *args: Any, **more: Any) -> Any:
        """Run a command and, unless asked for its result, end the process with its status."""
        ends, more["standalone_mode"] = more.get("standalone_mode", True), False
        if not ends:
            return super().main(*args, **more)
        try:
            sys.exit(super().main(*args, **more))
        except _ClickError as error:
            _show_misuse(error)
            sys.exit(_MISUSED)
        except typer.Abort:
            show_message(Console(stderr=True), "aborted")
            sys.exit(_ABORTED)


def _show_misuse(error: Any) -> None:
    message = " ".join(error.format_message().split()).rstrip(".")
    # Without any argument the message is the help, which has been shown.
    if type(error).__name__ == "NoArgsIsHelpError":
        return
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    show_message(Console(stderr=True), f"{message}{hint}")


def _choose_markup() -> Any:
    return "rich" if shutil.get_terminal_size().columns >= _FRAMED_COLUMNS else None
