"""Run the command line: ``distlion`` and ``python -m distlion``."""

from __future__ import annotations

import sys

from distlion.errors import MissingDependencyError


def main() -> None:
    """Run the command that the arguments name; the exit status is 0 only on success."""
    try:
        # Inside, so that a missing package is told in one line.
        from distlion.lab.cli import app
    except MissingDependencyError as error:
        sys.exit(f"distlion: {error}")
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(
            f"distlion: the command line needs the package {error.name!r}: "
            f'pip install "distlion[train]"'
        )
    app(prog_name="distlion")


if __name__ == "__main__":
    main()
