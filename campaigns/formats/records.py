"""Records of runs, and the folders of comparisons that reports are made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from comparisons import make_record, make_run, write_comparison
from distlion.wire import LinkModel
from distlion_lab.report.comparison import read_comparison
from distlion_lab.report.comparison_report import write_comparison_report
from distlion_lab.report.comparison_tables import tabulate_outcome, tabulate_tuning
from distlion_lab.training.compare import choose_lr
from distlion_lab.training.record import describe_versions
from distlion_lab.training.run_record import FORMAT, RecordFolder
from formats.mutate import mutate_json_text

LINK = LinkModel(latency_s=1e-3, rate_bit_per_s=1e9)
# To draw takes a hundred times as long as all else.
DRAWN_SHARE = 0.0005


class Comparisons:
    """A comparison whose index or one of whose records is damaged; reports are made of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = write_comparison(
            folder / "out", methods=("majority", "global-lion"), workers=(4,), seeds=1
        )
        index = self._folder / "comparison.json"
        paths = [index, *sorted((self._folder / "runs").iterdir())]
        self._whole = {path: path.read_bytes() for path in paths}

    def attempt(self, chance: random.Random) -> None:
        """Damage a file, read the folder, and lay out its tables; now and then, its report."""
        path = chance.choice([next(iter(self._whole)), *self._whole])
        path.write_bytes(mutate_json_text(self._whole[path], chance))
        try:
            comparison = read_comparison(self._folder)
            for workers in comparison.workers:
                tabulate_outcome(comparison, workers, link=LINK, rate="1gbit")
            tabulate_tuning(comparison)
            if chance.random() < DRAWN_SHARE:
                write_comparison_report(self._folder, link=LINK, rate="1gbit")
        finally:
            path.write_bytes(self._whole[path])


class SavedRuns:
    """The record that a comparison looks for before it repeats a run."""

    def __init__(self, folder: Path) -> None:
        self._settings = make_run()
        task: dict[str, Any] = {"name": "images", "data": "digits", "model_type": "vit"}
        self._records = RecordFolder(folder, task)
        self._path = self._records.path(self._settings)
        record = {
            **make_record(),
            "format": FORMAT,
            "settings": self._settings.to_json(),
            "versions": describe_versions(),
            "task": task,
        }
        self._whole = json.dumps(record).encode()
        self._path.write_bytes(self._whole)
        assert self._records.read(self._settings) is not None

    def attempt(self, chance: random.Random) -> None:
        """Damage the record, look for it, and choose a learning rate by it."""
        self._path.write_bytes(mutate_json_text(self._whole, chance))
        record = self._records.read(self._settings)
        if record is not None:
            choose_lr([(1e-3, record)])
