"""The first method to reach a loss, and a check of the protocol's two claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import target_path  # noqa: F401
from arrivals import Blocks, Entry
from contest import DDP, DILOCOS, FIRST, Local, read_local

DECIDING_SHARE, DECIDING_LINK, DECIDING_TASK = 0.8, "10mbit", "text"
_AS_FAST, _EACH_AS_FAST = 10.0, 5.0
_NOT_YET = "not yet"
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
        without: Votes of the first H whose longer runs are missing.
        is_ten_times: The verdict on "at least 10 times as fast".
        diloco: The best DiLoCo of any H; None before those of the same H are known.
        is_ahead: The verdict on "ahead of DiLoCo".
    """

    best: str | None = None
    ratio: float = math.nan
    least_ratio: float = math.nan
    without: tuple[str, ...] = ()
    is_ten_times: str = _NOT_YET
    diloco: str | None = None
    is_ahead: str = _NOT_YET

    @property
    def ten_times(self) -> str:
        """The first verdict, with the longer runs that it does without."""
        if self.is_ten_times == _NOT_YET or not self.without:
            return self.is_ten_times
        return f"{self.is_ten_times}, without longer runs of {', '.join(self.without)}"


def judge(entries: Sequence[Entry], targets: Seconds, blocks: Blocks) -> Claims:
    """Judge both claims, from all methods on the deciding task and link.

    Neither is judged before DDP and all votes of the first H are complete at DDP's length. The
    first is denied only once these are complete at both lengths. The second one waits for both
    kinds of DiLoCo of the best vote's H, at both lengths.
    """
    found = list_sooner(entries, targets, blocks)
    known = [(entry, seconds) for entry, seconds in found if seconds is not None]
    ddp = next((seconds for entry, seconds in known if entry.method == DDP), None)
    first = _find_first(known, is_vote)
    if first is None or ddp is None:
        return Claims()
    best, seconds = first
    slowest = max(seconds.values())
    ratio, least = _mean(ddp) / _mean(seconds), _mean(ddp) / slowest
    complete = _list_complete(entries, targets, blocks)
    votes = list(dict.fromkeys(each.method for each in entries if _is_first_vote(each)))
    without = tuple(method for method in votes if (method, True) not in complete)
    claims = Claims(best.title, ratio, least, without)
    if any((method, False) not in complete for method in votes):
        return claims
    is_ten_times = ratio >= _AS_FAST and least >= _EACH_AS_FAST
    if is_ten_times or not without:  # longer runs may still be sooner
        claims = replace(claims, is_ten_times=_say(is_ten_times))
    dilocos = _name_dilocos(best)
    if not complete.issuperset(product(dilocos, (False, True))):
        return claims
    other = _find_first(known, _is_diloco)
    assert other is not None
    is_ahead = slowest < _mean(other[1])
    return replace(claims, diloco=other[0].title, is_ahead=_say(is_ahead))


def _find_first(
    known: Sequence[tuple[Entry, Seconds]], belongs: Callable[[Entry], bool]
) -> tuple[Entry, Seconds] | None:
    """Return the soonest of those that belong, with its seconds; None where none does."""
    pairs = [pair for pair in known if belongs(pair[0])]
    return min(pairs, key=lambda pair: _mean(pair[1])) if pairs else None


def _list_complete(
    entries: Sequence[Entry], targets: Seconds, blocks: Blocks
) -> set[tuple[str, bool]]:
    """Return the methods of which all seeds are there and timed, with whether they are long."""
    return {
        (entry.method, entry.cell.is_long)
        for entry in entries
        if entry.seconds_to(targets, blocks) is not None
    }


def _is_first_vote(entry: Entry) -> bool:
    local = read_local(entry.method)
    return is_vote(entry) and local is not None and local.every == FIRST


def _is_diloco(entry: Entry) -> bool:
    local = read_local(entry.method)
    return local is not None and local.kind in DILOCOS


def _name_dilocos(best: Entry) -> list[str]:
    local = read_local(best.method)
    assert local is not None
    return [Local(local.every, kind).method for kind in DILOCOS]


def _say(holds: bool) -> str:
    return "yes" if holds else "no"
