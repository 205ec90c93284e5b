"""The first method to reach a loss, and a check of the protocol's two claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import target_path  # noqa: F401
from arrivals import Blocks, Entry
from contest import DDP, read_local

DECIDING_SHARE, DECIDING_LINK, DECIDING_TASK = 0.8, "10mbit", "text"
_AS_FAST, _EACH_AS_FAST = 10.0, 5.0
Seconds = Mapping[int, float]


def list_sooner(
    entries: Sequence[Entry], targets: Seconds, blocks: Blocks, *, hides: bool = False
) -> list[tuple[Entry, Seconds | None]]:
    """Return each method once, at the length that is sooner in mean seconds, with its seconds."""
    found: dict[str, tuple[Entry, Seconds | None]] = {}
    for entry in entries:
        seconds = entry.seconds_to(targets, blocks, hides=hides)
        known = found.get(entry.method)
        if known is None or _mean(seconds) < _mean(known[1]):
            found[entry.method] = entry, seconds
    return list(found.values())


def _mean(seconds: Seconds | None) -> float:
    return math.inf if seconds is None else fmean(seconds.values())


def is_vote(entry: Entry) -> bool:
    """Return whether a method is ``LocalSteps`` with votes."""
    return entry.method.startswith("local-")


@dataclass(frozen=True)
class Claims:
    """Claims that the protocol lets the report make.

    Attributes:
        best: The best vote; None before anything is known.
        ratio: How many times as long DDP takes, in the mean.
        least_ratio: The same, of the slowest seed against DDP's mean.
        is_ten_times: The verdict on "at least 10 times as fast".
        diloco: The best DiLoCo of the same H; None before it is known.
        is_ahead: The verdict on "ahead of DiLoCo".
    """

    best: str | None = None
    ratio: float = math.nan
    least_ratio: float = math.nan
    is_ten_times: str = "not yet"
    diloco: str | None = None
    is_ahead: str = "not yet"


def judge(entries: Sequence[Entry], targets: Seconds, blocks: Blocks) -> Claims:
    """Judge both claims, from all methods on the deciding task and link."""
    found = [pair for pair in list_sooner(entries, targets, blocks) if pair[1] is not None]
    known = [(entry, seconds) for entry, seconds in found if seconds is not None]
    votes = [pair for pair in known if is_vote(pair[0])]
    ddp = next((seconds for entry, seconds in known if entry.method == DDP), None)
    if not votes or ddp is None:
        return Claims()
    best, seconds = min(votes, key=lambda pair: _mean(pair[1]))
    ratio, least = _mean(ddp) / _mean(seconds), _mean(ddp) / max(seconds.values())
    is_ten_times = ratio >= _AS_FAST and least >= _EACH_AS_FAST
    local = read_local(best.method)
    assert local is not None
    means = [
        pair
        for pair in known
        if (other := read_local(pair[0].method)) is not None
        and other.kind.startswith("diloco")
        and other.every == local.every
    ]
    if not means:
        return Claims(best.title, ratio, least, _say(is_ten_times))
    diloco, mean_seconds = min(means, key=lambda pair: _mean(pair[1]))
    is_ahead = max(seconds.values()) < _mean(mean_seconds)
    return Claims(best.title, ratio, least, _say(is_ten_times), diloco.title, _say(is_ahead))


def _say(holds: bool) -> str:
    return "yes" if holds else "no"
