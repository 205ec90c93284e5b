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
    """Hold everything that is known of a finished run.

    Args:
        format: Version of this layout.
        settings: As ``TrainSettings.to_json``.
        versions: Of distlion, torch, transformers, Python and the platform.
        task: Facts about data and model.
        trainable_parameters: Their number.
        world_size: Number of workers.
        first_heldout_loss: Nats per prediction, before the first step.
        final_heldout_loss: Nats per prediction, after the last step.
        final_heldout_accuracy: Share of held-out predictions that are right, after the last step.
        final_train_loss: Mean over workers and over the last steps, at most 20, in nats.
        wall_s: Seconds from before the first evaluation to after the last one.
        sent_bytes_per_worker: What the steps sent, the most of any worker.
        full_precision_bytes_per_worker: What a ring all-reduce of fp32 gradients would have sent.
        bits_per_parameter: Bits that a worker sends in a step for each trainable parameter.
        replicas_equal: Whether the workers ended with bitwise identical parameters.
        traffic: The account of rank 0.
        losses: Series ``step``, ``seconds``, ``loss`` (mean over workers) and ``lr``.
        evaluations: Series ``step`` (steps done), ``seconds``, ``loss`` and ``accuracy``.
        diagnostics: ``Diagnosis`` of votes, one for each parameter and look; as rank 0 found them.
    """

    format: int = FORMAT
    settings: dict[str, Any]
    versions: dict[str, str]
    task: dict[str, str | int]
    trainable_parameters: int
    world_size: int
    first_heldout_loss: float
    final_heldout_loss: float
    final_heldout_accuracy: float
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

    def to_json(self) -> dict[str, Any]:
        """Return the content of the record file."""
        return dataclasses.asdict(self)

    def summary(self) -> dict[str, Any]:
        """Return the record without its series."""
        return {name: value for name, value in self.to_json().items() if name not in _SERIES}


def describe_versions() -> dict[str, str]:
    """Name the software that the numbers of a run depend on."""
    return {
        "distlion": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def claim_run_dir(run_dir: Path) -> None:
    """Make the folder of a run, refusing one that holds a record.

    Raises:
        InvalidArgumentError: It holds a record already, or cannot be made.
    """
    if (run_dir / RECORD_NAME).exists():
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
    """Write a text file atomically, in the place of an existing one."""
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
