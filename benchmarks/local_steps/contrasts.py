"""Differences between last losses, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import target_path  # noqa: F401
from arrivals import Entry
from contest import DDP, FIRST, SIMPLEST, Local
from intervals import Array, spread
from scoring import unpack_units


@dataclass(frozen=True)
class Contrast:
    """A method beside a reference, by its last test loss; lower is better.

    Attributes:
        entry, reference: Their runs.
        n_seeds: In common, two or more.
        mean: Over seeds, of the method's loss minus the reference's.
        low, high: The two-sided 95 % confidence interval.
    """

    entry: Entry
    reference: Entry
    n_seeds: int
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The side on which the whole interval lies."""
        if self.low > 0:
            return "trails"
        return "leads" if self.high < 0 else "inconclusive"


def list_contrasts(entries: Sequence[Entry]) -> Iterator[Contrast]:
    """Compare all methods with DDP, and those of local steps with the simplest vote, if known.

    DDP has runs of one length only. The simplest vote is compared at equal lengths.
    """
    simplest = Local(FIRST, SIMPLEST).method
    for reference in entries:
        if reference.method not in (DDP, simplest):
            continue
        for entry in entries:
            is_other = entry.method not in (reference.method, DDP)
            is_fair = entry.cell.is_long == reference.cell.is_long
            if is_other and (is_fair or reference.method == DDP):
                found = find_contrast(entry, reference)
                if found is not None:
                    yield found


def find_contrast(entry: Entry, reference: Entry) -> Contrast | None:
    """Compare the seeds that ended in both; None below two."""
    seeds = sorted(set(entry.curves) & set(reference.curves))
    if len(seeds) < 2:
        return None
    by_unit = np.array([read_losses(entry, seed) - read_losses(reference, seed) for seed in seeds])
    mean = float(by_unit.mean())
    half, _ = spread(by_unit)
    return Contrast(entry, reference, len(seeds), mean, mean - half, mean + half)


def read_losses(entry: Entry, seed: int) -> Array:
    """Return the last losses of text by block; of images, which have none by image, their mean."""
    if entry.cell.setting.task == "text":
        return unpack_units(entry.records[seed]["test"]["units"])
    return np.array([entry.curves[seed][-1][1]])
