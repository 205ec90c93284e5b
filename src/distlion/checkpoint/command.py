"""``distlion checkpoint``: inspect and verify a checkpoint without loading it."""

from __future__ import annotations

import json
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlion.checkpoint.folder import Manifest
from distlion.checkpoint.verify import inspect_checkpoint, verify_checkpoint
from distlion.command_line import Parser
from distlion.errors import CheckpointError

_WHOLE, _DAMAGED, _LISTED, _MISSING = "whole", "damaged", "listed", "missing"
_VERIFY = "Compare every file with its recorded size and SHA-256; exit with 0 only if all match."
_SHOW = "Show the manifest of a checkpoint; its other files are not read."
_EXAMPLE = "Example: distlion checkpoint {} runs/first/checkpoints"


def make_parser() -> Parser:
    """Make the parser of the command and of those below it."""
    parser = Parser(
        prog="distlion checkpoint",
        description="Inspect a checkpoint, and verify that it is complete.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("verify", _VERIFY), ("show", _SHOW)):
        command = commands.add_parser(
            name, help=text, description=text, epilog=_EXAMPLE.format(name)
        )
        command.add_argument(
            "path",
            type=Path,
            help="Folder of a run's checkpoints, for the latest one, or of one: step-...",
        )
        command.add_argument("--json", action="store_true", help="Print JSON to standard output.")
    return parser


def run(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged or incomplete.
    """
    asked = make_parser().parse_args(arguments[1:])
    (_verify if asked.command == "verify" else _show)(asked.path, as_json=asked.json)


def _verify(path: Path, *, as_json: bool) -> None:
    report = verify_checkpoint(path)
    states = {
        name: _DAMAGED if name in report.damaged else _WHOLE for name in report.manifest.files
    }
    _print(report.folder, report.manifest, states, as_json=as_json)
    if report.problems:
        more = len(report.problems) - 1
        others = f"; {more} more of its files are not whole" if more else ""
        raise CheckpointError(f"{report.problems[0]}{others}")


def _show(path: Path, *, as_json: bool) -> None:
    folder, manifest = inspect_checkpoint(path)
    missing = [name for name in manifest.files if not (folder / name).exists()]
    states = {name: _MISSING if name in missing else _LISTED for name in manifest.files}
    _print(folder, manifest, states, as_json=as_json)
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing[:5])}")


def _print(folder: Path, manifest: Manifest, states: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        text = json.dumps(_to_record(folder, manifest, states), indent=1)
    else:
        text = _to_text(folder, manifest, states)
    # Before an error about what it shows.
    print(text, flush=True)


def _to_text(folder: Path, manifest: Manifest, states: Mapping[str, str]) -> str:
    nodes = f" in nodes of {manifest.node_size}" if manifest.node_size > 1 else ""
    rows = [("file", "bytes", "state")]
    rows += [(name, f"{file.n_bytes:,}", states[name]) for name, file in manifest.files.items()]
    names, sizes = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        [
            str(folder),
            f"step {manifest.step}, {manifest.workers} workers{nodes}, seed {manifest.seed}, "
            f"{manifest.n_bytes:,} bytes, by distlion {manifest.distlion} with torch "
            f"{manifest.torch}",
            "",
            *(f"{name:<{names}}  {size:>{sizes}}  {state}" for name, size, state in rows),
        ]
    )


def _to_record(folder: Path, manifest: Manifest, states: Mapping[str, str]) -> dict[str, object]:
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
            name: {"n_bytes": file.n_bytes, "sha256": file.sha256, "state": states[name]}
            for name, file in manifest.files.items()
        },
    }
