"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlion_lab.cli.table import print_table
from distlion_lab.names import name_rule
from distlion_lab.training.record import RECORD_NAME, Record
from distlion_lab.training.run import FIGURE_NAME

_MEGABYTE = 1_000_000


def print_summary(console: Console, record: Record, run_dir: Path) -> None:
    """Show a run's results, its cost, and the paths of its files."""
    print_table(console, _build_table(record))
    # Outside the table: a narrow terminal cuts its cells.
    for what, name in (("record", RECORD_NAME), ("figure", FIGURE_NAME)):
        console.print(Text(f"{what}: {run_dir / name}"), soft_wrap=True)


def _build_table(record: Record) -> Table:
    settings = record.settings
    table = Table(
        title=f"{settings['task']}, {name_rule(settings)}, {record.world_size} workers, "
        f"{settings['steps']} steps",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    for part, name in (("train", "training"), ("heldout", "validation")):
        for unit in ("tokens", "images"):
            if (size := record.task.get(f"{part}_{unit}")) is not None:
                table.add_row(f"{name} {unit}", f"{size:,}")
    table.add_row("final training loss", f"{record.final_train_loss:.4f}")
    table.add_row("initial validation loss", f"{record.initial_validation_loss:.4f}")
    table.add_row("final validation loss", f"{record.final_validation_loss:.4f}")
    table.add_row("validation accuracy", f"{record.final_validation_accuracy:.1%}")
    table.add_row("wall time", f"{record.wall_s:.1f} s")
    if settings.get("every") is not None:
        table.add_row("votes", str(record.traffic["steps"]))
    table.add_row("sent by each worker, measured", _format_bytes(record.sent_bytes_per_worker))
    table.add_row(
        "fp32 all-reduce would have sent", _format_bytes(record.full_precision_bytes_per_worker)
    )
    table.add_row("reduction", _format_reduction(record))
    table.add_row("bits per parameter and step", f"{record.bits_per_parameter:.3f}")
    table.add_row("replicas bitwise identical", "yes" if record.replicas_equal else "NO")
    return table


def _format_bytes(n_bytes: int) -> str:
    return f"{n_bytes / _MEGABYTE:,.2f} MB"


def _format_reduction(record: Record) -> str:
    if record.sent_bytes_per_worker == 0:
        return "nothing was sent"
    return f"{record.full_precision_bytes_per_worker / record.sent_bytes_per_worker:.1f}x"
