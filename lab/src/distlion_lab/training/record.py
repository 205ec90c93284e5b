"""The record of a run: one JSON file that figures and comparisons read."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from distlion import __version__
from distlion.errors import InvalidArgumentError

RECORD_NAME = "record.json"
FORMAT = 1
_SERIES = ("losses", "evaluations", "diagnostics")


@dataclass(frozen=True, kw_only=True)
class Record:
    """All results of a finished run.

    Args:
        format: Version of this layout.
        settings: The settings, by ``TrainSettings.to_json``.
        versions: Versions of distlion, torch, transformers, Python and the platform.
        task: Facts about data and model.
        trainable_parameters: Number of trainable parameters.
        world_size: Number of workers.
        initial_validation_loss: Initial validation loss, in nats per prediction.
        final_validation_loss: Validation loss after the last step, in nats per prediction.
        final_validation_accuracy: Validation accuracy after the last step, 0 to 1.
        final_train_loss: Training loss in nats, the mean over workers and at most the last 20
            steps.
        wall_s: Seconds from before the first evaluation to after the last one.
        sent_bytes_per_worker: Bytes of the steps, from the worker that sent most.
        full_precision_bytes_per_worker: Bytes of a ring all-reduce of fp32 gradients.
        bits_per_parameter: Bits that a worker sends in a step for each trainable parameter.
        replicas_equal: True if the workers ended with bitwise identical parameters.
        traffic: Rank 0's account of traffic.
        losses: Series ``step``, ``seconds``, ``loss`` (mean over workers) and ``lr``.
        evaluations: Series ``step`` (steps done), ``seconds``, ``loss`` and ``accuracy``.
        diagnostics: ``Diagnosis`` of votes, one for each parameter and diagnosed step, from rank 0.
        sample: ``prompt`` from the validation text, its continuation by the trained ``model``, and
            by the ``data``. Empty for images, and from a crew.
    """

    format: int = FORMAT
    settings: dict[str, Any]
    versions: dict[str, str]
    task: dict[str, str | int]
    trainable_parameters: int
    world_size: int
    initial_validation_loss: float
    final_validation_loss: float
    final_validation_accuracy: float
    final_train_loss: float
    wall_s: float
    sent_bytes_per_worker: int
    full_precision_bytes_per_worker: int
    bits_per_parameter: float
    replicas_equal: bool
    traffic: dict[str, Any]
    losses: dict[str, list[float]]
    evaluations: dict[str, list[float]]
    diagnostics: list[dict[str, Any]]
    sample: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the record file."""
        return dataclasses.asdict(self)

    def summary(self) -> dict[str, Any]:
        """Return the record without its series."""
        return {name: value for name, value in self.to_json().items() if name not in _SERIES}


def describe_versions() -> dict[str, str]:
    """Name the software on which the numbers of a run depend."""
    return {
        "distlion": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def claim_run_dir(run_dir: Path) -> None:
    """Make the folder of a run; refuse one that holds a record.

    Raises:
        InvalidArgumentError: It holds a record already, or cannot be made.
    """
    # Unlike Path.exists, it raises for no name and no folder that may not be entered.
    if os.path.exists(run_dir / RECORD_NAME):
        raise InvalidArgumentError(
            f"run folder {str(run_dir)!r} holds a {RECORD_NAME} already; choose another "
            f"--run-dir or remove that record"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"run folder {str(run_dir)!r} cannot be made ({error.strerror}); choose another "
            f"--run-dir"
        ) from error


def write_record(record: Record, run_dir: Path) -> Path:
    """Write ``record.json`` atomically and return its path."""
    path = run_dir / RECORD_NAME
    write_whole(path, json.dumps(record.to_json(), indent=1, allow_nan=False) + "\n")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, replacing an existing one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".record-", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink()
            raise
