"""A training run on the command line: how far it is, and what it reached."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import typer
from rich.console import Console

from distlion.errors import ReplicaMismatchError, UnwrittenRunError
from distlion.lab.cli.progress import ProgressDisplay
from distlion.lab.cli.summary import print_summary
from distlion.lab.training import CheckpointSettings, Record, TrainSettings, train


@dataclass(frozen=True)
class Runs:
    """Train, and show how far it is.

    Args:
        messages: The console of the progress.
        oversubscribe: Whether local workers may be more than cores and memory hold.
        crew: Whether local workers form a crew.
    """

    messages: Console
    _: KW_ONLY
    oversubscribe: bool = False
    crew: bool = False

    def train(
        self, settings: TrainSettings, run_dir: Path, checkpoints: CheckpointSettings
    ) -> Record | None:
        """Return what a run reached; None on all ranks of torchrun's world but the first.

        Raises:
            DistlionError: As ``distlion.lab.training.train``. A record that could not be written is
                printed first.
        """
        with ProgressDisplay(self.messages, workers=settings.workers) as display:
            try:
                return train(
                    settings,
                    run_dir=run_dir,
                    observe=display,
                    checkpoints=checkpoints,
                    oversubscribe=self.oversubscribe,
                    crew=self.crew,
                    starting=display.announce,
                )
            except UnwrittenRunError as error:
                if not error.is_record_written:  # a run may have taken days
                    typer.echo(json.dumps(error.record.to_json(), indent=1))
                raise


def show_record(record: Record, run_dir: Path, *, as_json: bool) -> None:
    """Print what a run reached.

    Raises:
        ReplicaMismatchError: Its workers ended with different parameters.
    """
    if as_json:
        typer.echo(json.dumps(record.summary() | {"run_dir": str(run_dir)}, indent=1))
    else:
        print_summary(Console(), record, run_dir)
    if not record.replicas_equal:
        raise ReplicaMismatchError(f"the workers ended with different parameters; see {run_dir}")
