"""``distlion checkpoint``: inspect and verify a checkpoint without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from distlion.checkpoint import Manifest, inspect_checkpoint, verify_checkpoint
from distlion.errors import CheckpointError
from distlion.lab.cli.command import Command, Group
from distlion.lab.cli.failure import shown_failures
from distlion.lab.cli.table import build_table, print_table

EXAMPLE = "Example: distlion checkpoint verify runs/first/checkpoints"
_WHOLE, _DAMAGED, _LISTED = "whole", "damaged", "listed"

checkpoint_app = typer.Typer(
    cls=Group,
    name="checkpoint",
    help="Inspect a checkpoint, and verify that it is complete.",
    no_args_is_help=True,
)

_Path = Annotated[
    Path,
    typer.Argument(help="Folder of a run's checkpoints, for the latest one, or of one: step-..."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]


@checkpoint_app.command("verify", cls=Command, epilog=EXAMPLE)
def verify_command(path: _Path, *, as_json: _AsJson = False) -> None:
    """Compare every file with its recorded size and SHA-256; exit with 0 only if all match."""
    with shown_failures(Console(stderr=True)):
        report = verify_checkpoint(path)
        states = {
            name: _DAMAGED if name in report.damaged else _WHOLE for name in report.manifest.files
        }
        _show(report.folder, report.manifest, states, as_json=as_json)
        if report.problems:
            more = len(report.problems) - 1
            others = f"; {more} more of its files are not whole" if more else ""
            raise CheckpointError(f"{report.problems[0]}{others}")


@checkpoint_app.command("show", cls=Command, epilog=EXAMPLE.replace("verify", "show"))
def show_command(path: _Path, *, as_json: _AsJson = False) -> None:
    """Show the manifest of a checkpoint; its other files are not read."""
    with shown_failures(Console(stderr=True)):
        folder, manifest = inspect_checkpoint(path)
        missing = [name for name in manifest.files if not (folder / name).exists()]
        states = {name: "missing" if name in missing else _LISTED for name in manifest.files}
        _show(folder, manifest, states, as_json=as_json)
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing[:5])}")


def _show(folder: Path, manifest: Manifest, states: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_to_record(folder, manifest, states), indent=1))
        return
    console = Console()
    # Outside the table: a narrow terminal cuts its cells.
    console.print(Text(str(folder)), soft_wrap=True)
    nodes = f" in nodes of {manifest.node_size}" if manifest.node_size > 1 else ""
    console.print(
        Text(
            f"step {manifest.step}, {manifest.workers} workers{nodes}, seed {manifest.seed}, "
            f"{manifest.n_bytes:,} bytes, by distlion {manifest.distlion} with torch "
            f"{manifest.torch}"
        ),
        soft_wrap=True,
    )
    rows = [(name, f"{record.n_bytes:,}", states[name]) for name, record in manifest.files.items()]
    print_table(console, build_table(("file", "bytes", "state"), rows, left=("file", "state")))


def _to_record(folder: Path, manifest: Manifest, states: dict[str, str]) -> dict[str, object]:
    return {
        "folder": str(folder),
        "step": manifest.step,
        "workers": manifest.workers,
        "node_size": manifest.node_size,
        "processes": manifest.processes,
        "seed": manifest.seed,
        "distlion": manifest.distlion,
        "torch": manifest.torch,
        "n_bytes": manifest.n_bytes,
        "files": {
            name: {"n_bytes": record.n_bytes, "sha256": record.sha256, "state": states[name]}
            for name, record in manifest.files.items()
        },
    }
