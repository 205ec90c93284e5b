"""Commands of typer that report misuse in one line and fit into narrow terminals."""

from __future__ import annotations

import re
import shutil
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from distlion.command_line import FAILED, MISUSED, report_refused_output
from distlion_lab.cli.failure import named_options, show_message
from distlion_lab.names import suggest

# Depending on its version, typer has a private copy of click, or uses click itself.
_ClickError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_CHOICES = re.compile(r"(?:Value error, )?'(?P<given>[^']*)' is not one of (?P<known>'.+')")
# Narrower, the frames that typer draws cut the names of options.
_FRAMED_COLUMNS = 80


class Command(TyperCommand):
    """A command with errors that name its options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = _choose_markup()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with named_options({param.name: param.opts[0] for param in self.params}):
            return super().invoke(ctx)


class Group(TyperGroup):
    """A group of commands that reports misuse in one line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = _choose_markup()
        super().format_help(ctx, formatter)

    def main(self, *args: Any, **more: Any) -> Any:
        """Run a command and end the process with its status, unless asked for its result."""
        ends, more["standalone_mode"] = more.get("standalone_mode", True), False
        if not ends:
            return super().main(*args, **more)
        try:
            status = super().main(*args, **more)
            # Buffered output may be refused too, and an error at exit would go unseen.
            sys.stdout.flush()
            sys.exit(status)
        except _ClickError as error:
            _show_misuse(error)
            sys.exit(MISUSED)
        except typer.Abort:
            show_message(Console(stderr=True), "aborted")
            sys.exit(FAILED)
        except OSError as error:
            if not report_refused_output(error):
                raise
            sys.exit(FAILED)


def _show_misuse(error: Any) -> None:
    message = _CHOICES.sub(_name_nearest, " ".join(error.format_message().split()).rstrip("."))
    # Without arguments the message is the help, which has been shown.
    if type(error).__name__ == "NoArgsIsHelpError":
        return
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    show_message(Console(stderr=True), f"{message}{hint}")


def _name_nearest(choices: re.Match[str]) -> str:
    """Suggest the choice that an unknown name probably meant, or list all choices."""
    known = re.findall("'([^']*)'", choices["known"])
    return f"{choices['given']!r} is unknown; {suggest(choices['given'], known, all_in='--help')}"


def _choose_markup() -> Any:
    return "rich" if shutil.get_terminal_size().columns >= _FRAMED_COLUMNS else None
