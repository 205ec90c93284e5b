"""What has been recorded of each method: curves, bytes, and seconds out of timed blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import target_path  # noqa: F401
from archive import Records
from crossing import Curve, cross
from design import DDP, EXCHANGE, MAJORITY, TIMED_AS, list_cells, read_local
from evidence import Ending
from outcome import Row, read_row
from plan import SHORT
from settings import FLOOR, Target

_TITLES = {
    DDP: "DDP, fp32 + AdamW",
    MAJORITY: "majority vote in each step",
    SHORT: "majority vote in each step, betas (0.9, 0.95)",
}
LOAD = "load_average_before"
"""Of the minute before the first link; the later ones' would be that of the lab."""
Blocks = Mapping[str, Sequence[float]]
"""Of one link: seconds of a step, an exchange or a period in each block."""


@dataclass(frozen=True)
class Method:
    """A method with all that has been recorded of it.

    Attributes:
        row: Its curves and rate.
        ending: Its runs, for bounds.
    """

    row: Row
    ending: Ending

    @property
    def name(self) -> str:
        """Name."""
        return self.row.cell.method

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.row.title

    @property
    def votes_seldom(self) -> bool:
        """Whether it is what the study is about."""
        local = read_local(self.name)
        return local is not None and local[0] == "votes"

    @property
    def is_drawn(self) -> bool:
        """Whether it has a whole curve."""
        return self.row.is_complete and not self.row.has_diverged

    @property
    def bits(self) -> float | None:
        """Bits up and down for each parameter and step; None before a run."""
        # One that diverged may have stopped before its first exchange.
        ended = [each for each in self.ending.records.values() if each["diverged"] is None]
        return next((each["bits_up"] + each["bits_down"] for each in ended), None)

    @property
    def step_mb(self) -> float | None:
        """Megabytes up and down in a step, as ``bits``."""
        bits = self.bits
        n_elements = next((each["parameters"] for each in self.ending.records.values()), 0)
        return None if bits is None else bits * n_elements / 8e6

    def seconds(self, target: Target, blocks: Blocks) -> dict[int, float] | None:
        """Return seconds to a target by seed, infinite where it is not reached; None if unknown."""
        step_s = find_step_s(self.name, blocks)
        if step_s is None or not self.row.is_complete:
            return None
        steps = {
            seed: None if seed in self.row.diverged else cross(curve, "text", target.value)
            for seed, curve in self.row.curves.items()
        }
        return {seed: math.inf if n is None else n * step_s for seed, n in steps.items()}


def read_methods(records: Records) -> list[Method]:
    """Return the methods that are reported, as far as tuning has chosen them."""
    return [
        Method(read_row(cell, make_title(cell.method), records), Ending.find(cell, records.read))
        for cell in list_cells(records.read)
    ]


def make_title(method: str) -> str:
    """Return what reports call a method."""
    local = read_local(method)
    if local is not None:
        return "{} every {} steps".format(*local)
    return _TITLES[method]


def read_timing(folder: Path, link: str) -> dict[str, Any] | None:
    """Return the record of what was timed on a link; None if it was not."""
    path = folder / f"steps_{link}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def read_blocks(folder: Path, link: str, *, own_cores: bool = False) -> Blocks:
    """Return what was timed on a link; nothing if it was not.

    Args:
        folder: Of the records.
        link: Which one.
        own_cores: Take from every step that part of a local step which hosts spend waiting for
            each other's cores. An estimate: work on packets, which waits too, stays as it is.
    """
    found = read_timing(folder, link)
    if found is None:
        return {}
    blocks: dict[str, list[float]] = found["seconds"]
    if not own_cores:
        return blocks
    waited_s = median(blocks[FLOOR]) * max(0.0, 1 - found["conditions"]["cores"] / found["hosts"])
    return {
        name: [each - waited_s for each in seconds] if name in (FLOOR, DDP, MAJORITY) else seconds
        for name, seconds in blocks.items()
    }


def find_step_s(method: str, blocks: Blocks) -> float | None:
    """Return the seconds of a step: as measured, or a local step and its share of an exchange."""
    local = read_local(method)
    if not blocks:
        return None
    if local is None:
        return median(blocks[TIMED_AS.get(method, method)])
    what, every = local
    return median(blocks[FLOOR]) + median(blocks[EXCHANGE.format(what)]) / every


def find_loss(curve: Curve, step: float) -> float | None:
    """Return the loss at a step, on straight lines; the last after the end; None before a score."""
    if step < curve[0][0]:
        return None
    for (begin, before, _), (end, after, _) in pairwise(curve):
        if step < end:
            return before + (after - before) * (step - begin) / (end - begin)
    return curve[-1][1]


def has_won(votes: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> bool:
    """Return whether votes are first in the mean and with every seed."""
    if not all(map(math.isfinite, votes.values())):
        return False
    return all(
        fmean(votes.values()) < fmean(other.values())
        and all(votes[seed] < other[seed] for seed in votes)
        for other in others
    )
