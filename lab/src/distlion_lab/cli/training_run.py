"""A training run on the command line: its progress and its results."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import typer
from rich.console import Console

from distlion.errors import ReplicaMismatchError
from distlion_lab.cli.progress import ProgressDisplay
from distlion_lab.cli.summary import print_summary
from distlion_lab.errors import UnwrittenRunError
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.network import Enter
from distlion_lab.training.record import Record
from distlion_lab.training.run import train
from distlion_lab.training.train_settings import TrainSettings


@dataclass(frozen=True)
class Runs:
    """Train, and show the progress.

    Args:
        messages: Console of the progress.
        oversubscribe: True to allow more local workers than cores and memory hold.
        crew: True if local workers form a crew.
        enter: Puts each local worker on a host of an emulated network; None for none.
    """

    messages: Console
    _: KW_ONLY
    oversubscribe: bool = False
    crew: bool = False
    enter: Enter | None = None

    def train(
        self, settings: TrainSettings, run_dir: Path, checkpoints: CheckpointSettings
    ) -> Record | None:
        """Train and return the record; None on all ranks of torchrun's world but the first.

        Raises:
            DistlionError: As in ``distlion_lab.training.train``. A record that could not be
                written is printed first.
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
                    enter=self.enter,
                )
            except UnwrittenRunError as error:
                if not error.is_record_written:  # a run may have taken days
                    typer.echo(json.dumps(error.record.to_json(), indent=1))
                raise


def show_record(record: Record, run_dir: Path, *, as_json: bool) -> None:
    """Print the results of a run.

    Raises:
        ReplicaMismatchError: The workers ended with different parameters.
    """
    if as_json:
        typer.echo(json.dumps(record.summary() | {"run_dir": str(run_dir)}, indent=1))
    else:
        print_summary(Console(), record, run_dir)
    if not record.replicas_equal:
        raise ReplicaMismatchError(f"the workers ended with different parameters; see {run_dir}")
