"""The table of a sweep over methods and rates, out of its record."""

from __future__ import annotations

from typing import Any

from distlion.errors import DataError

_MILLI = 1e3
_MEGA = 1e6
BASELINES = ("ddp-fp32", "all-reduce-fp32")
"""What speed-ups are relative to: the first of these that is in a sweep."""


def check_sweep(record: dict[str, Any]) -> None:
    """Check that a record is one of a sweep.

    Raises:
        DataError: It is not.
    """
    if not {"results", "settings", "missing"} <= record.keys():
        raise DataError("record lacks results, settings or missing; expected that of a sweep")


def find_baseline(record: dict[str, Any]) -> str | None:
    """Name the method that speed-ups are relative to; None if the sweep has none."""
    for name in BASELINES:
        if all(name in methods for methods in record["results"].values()):
            return name
    return None


def tabulate_sweep(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Lay out milliseconds and speed-up of each method at each rate, and what a step sends.

    Args:
        record: What ``distlion.lab.netlab.run_sweep`` returns, or the same read from JSON.

    Returns:
        The headings, and one row for each method. A step's bytes are those that the interface of
        the busiest host counted, at the last rate.

    Raises:
        DataError: The record is none of a sweep.
    """
    check_sweep(record)
    baseline = find_baseline(record)
    rates = list(record["results"])
    head = ["method", *(f"{rate}, ms" for rate in rates)]
    if baseline is not None:
        head += [f"{rate}, x {baseline}" for rate in rates]
    head.append("MB a step")
    rows = [
        _describe_method(record, name, rates, baseline) for name in record["settings"]["methods"]
    ]
    return head, rows


def _describe_method(
    record: dict[str, Any], name: str, rates: list[str], baseline: str | None
) -> list[str]:
    found = [record["results"][rate].get(name) for rate in rates]
    row = [name, *(_format(each and each["seconds"]["median"] * _MILLI) for each in found)]
    if baseline is not None:
        row += [_format(each and each["speed_up"][baseline]["median"]) for each in found]
    row.append(_format(found[-1] and max(found[-1]["interface_bytes"]) / _MEGA))
    return row


def _format(value: float | None) -> str:
    """Give three digits, and whole numbers no more."""
    if value is None:
        return "left out"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
