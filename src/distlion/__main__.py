"""Run the command line: ``distlion`` and ``python -m distlion``.

The commands ``checkpoint`` and ``crew`` need torch and numpy only. Other packages bring further
ones: each registers a function of a list of arguments, which begins with the name of the command,
as an entry point of the group ``distlion.commands``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from distlion import __version__
from distlion.command_line import FAILED, MISUSED, show_error, shown_failures
from distlion.errors import MissingDependencyError

GROUP = "distlion.commands"


@dataclass(frozen=True)
class Known:
    """A command that this page of help describes.

    Attributes:
        summary: What it does.
        module: Of this package, whose function ``run`` takes the arguments; None where another
            package brings the command.
        extra: What installs that package.
    """

    summary: str
    module: str | None = None
    extra: str = "train"


KNOWN = {
    "train": Known("Train with local workers that vote, or under torchrun."),
    "compare": Known("Train by several methods and report how they compare."),
    "plan": Known("Forecast the time of a step for a network, links and machines."),
    "doctor": Known("Measure these machines and their links, and advise."),
    "crew": Known("Run the store through which a crew's workers meet.", "distlion.crew.command"),
    "checkpoint": Known("Inspect or verify a checkpoint.", "distlion.checkpoint.command"),
    "netlab": Known("Emulate hosts and links on one Linux machine, as root.", extra="netlab"),
}


def main() -> None:
    """Run the command that the arguments name; the exit status is 0 only on success."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may have characters outside the stream's encoding, such as ASCII.
            stream.reconfigure(errors="backslashreplace")
    name, *arguments = sys.argv[1:] or ["--help"]
    with shown_failures():
        if name in ("-h", "--help"):
            print(write_help())
        elif name == "--version":
            print(f"distlion {__version__}")
        else:
            _find_command(name)([name, *arguments])
    if len(sys.argv) == 1:
        sys.exit(MISUSED)


def write_help() -> str:
    """Write what ``distlion --help`` prints."""
    brought = _list_brought()
    unknown = {
        name: Known(f"From {point.dist.name if point.dist else point.module}.")
        for name, point in brought.items()
        if name not in KNOWN
    }
    lines = [
        "Usage: distlion COMMAND [ARGS]...",
        "",
        "Train with workers that vote: one bit per parameter and step.",
        "",
        "Commands; 'distlion COMMAND --help' describes one:",
    ]
    for name, known in (KNOWN | unknown).items():
        is_here = known.module is not None or name in brought
        lacking = "" if is_here else f' (pip install "distlion[{known.extra}]")'
        lines.append(f"  {name:<11} {known.summary}{lacking}")
    return "\n".join([*lines, "", "  --version   Show the version.", "  -h, --help  Show this."])


def _list_brought() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _find_command(name: str) -> Callable[[list[str]], object]:
    known, brought = KNOWN.get(name), _list_brought()
    if known is not None and known.module is not None:
        run: Callable[[list[str]], object] = import_module(known.module).run
        return run
    if name in brought:
        try:
            return brought[name].load()  # type: ignore[no-any-return]
        except (MissingDependencyError, ModuleNotFoundError) as error:
            missing = getattr(error, "name", None) or ""
            if isinstance(error, ModuleNotFoundError) and missing.startswith("distlion"):
                raise
            what = f"it needs the package {missing!r}" if missing else str(error)
            show_error(f"the command {name!r} cannot run: {what}: {_install(name)}")
            sys.exit(FAILED)
    if known is not None:
        show_error(f"the command {name!r} is in a package of its own: {_install(name)}")
        sys.exit(FAILED)
    near = get_close_matches(name, KNOWN | brought, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    show_error(f"there is no command {name!r}; {meant}'distlion --help' lists all")
    sys.exit(MISUSED)


def _install(name: str) -> str:
    return f'pip install "distlion[{KNOWN[name].extra if name in KNOWN else "train"}]"'


if __name__ == "__main__":
    main()
