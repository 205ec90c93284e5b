"""The record of one run of a comparison, and the folder that keeps them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlion_lab.errors import DataError
from distlion_lab.json_file import read_json
from distlion_lab.report.comparison_files import check_run
from distlion_lab.training.record import describe_versions, write_whole
from distlion_lab.training.run_settings import RunSettings

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All results of a run with virtual workers.

    Records of equal settings differ only in ``timing`` and ``versions``.

    Args:
        format: Version of this layout.
        settings: The settings, by ``RunSettings.to_json``.
        versions: Versions of distlion, torch, transformers, Python and the platform.
        task: Facts about data and model.
        trainable_parameters: Number of trainable parameters.
        diverged: None, or the abandoned ``step`` and a ``message``: the loss or a gradient was not
            finite. The series then end before this step.
        up_bits_per_parameter: Uplink bits for each parameter and step, as papers count.
        down_bits_per_parameter: Downlink bits, likewise.
        sent_bytes_per_step: Bytes that one worker would send over a network, the mean of all steps.
        rounds: Number of sequential messages in a step.
        parameters_sha256: Digest of the final parameters.
        series: At each evaluation, ``step`` (steps done), ``train_loss`` (mean over workers and the
            steps since the last evaluation; None before the first step), ``validation_loss``,
            ``validation_accuracy``, ``test_loss``, ``test_accuracy`` (nats per prediction, shares)
            and ``sent_bytes`` (of one worker so far).
        timing: ``wall_s`` of the run, and ``compute_s``, the median seconds of one worker's forward
            and backward; None before there was any.
    """

    format: int = FORMAT
    settings: dict[str, Any]
    versions: dict[str, str]
    task: dict[str, str | int]
    trainable_parameters: int
    diverged: dict[str, Any] | None
    up_bits_per_parameter: float
    down_bits_per_parameter: float
    sent_bytes_per_step: float
    rounds: int
    parameters_sha256: str
    series: dict[str, list[Any]]
    timing: dict[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the record file."""
        return dataclasses.asdict(self)


class RecordFolder:
    """A folder with one file for each run, named by ``RunSettings.name_record``.

    A record counts if its settings, data and versions are the same.

    Args:
        folder: The folder; made if it does not exist.
        task: Facts about data and model, which a record must share.

    Raises:
        DataError: The folder cannot be made.
    """

    def __init__(self, folder: Path, task: dict[str, str | int]) -> None:
        self._folder = folder
        self._task = task
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"folder {str(folder)!r} cannot be made ({error.strerror}); choose another --out"
            ) from error

    def path(self, settings: RunSettings) -> Path:
        """Return the path of a run's record, whether it exists or not."""
        return self._folder / f"{settings.name_record()}.json"

    def read(self, settings: RunSettings) -> dict[str, Any] | None:
        """Return the record of a run; None where no complete one counts."""
        try:
            record: dict[str, Any] = read_json(self.path(settings))
            check_run(record)
        except DataError:
            return None
        if record.get("format") != FORMAT:
            return None
        found = record.get("settings"), record.get("task"), _software(record.get("versions"))
        wanted = settings.to_json(), self._task, _software(describe_versions())
        return record if found == wanted else None

    def write(self, settings: RunSettings, record: RunRecord) -> None:
        """Write a record atomically.

        Raises:
            DataError: It cannot be written.
        """
        path = self.path(settings)
        text = json.dumps(record.to_json(), indent=1, allow_nan=False) + "\n"
        try:
            write_whole(path, text)
        except OSError as error:
            raise DataError(
                f"record {str(path)!r} cannot be written: {error.strerror}. Finished runs have "
                "theirs: make room, and run distlion compare again"
            ) from error


def _software(versions: Any) -> dict[str, str] | None:
    """Leave out the platform, since a folder may move to another one."""
    if not isinstance(versions, dict):
        return None
    return {name: version for name, version in versions.items() if name != "platform"}
