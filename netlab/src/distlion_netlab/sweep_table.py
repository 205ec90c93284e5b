"""The table of a sweep over methods and rates, from its record."""

from __future__ import annotations

from typing import Any

from distlion_lab.errors import DataError

_MILLI = 1e3
_MEGA = 1e6
BASELINES = ("ddp-fp32", "all-reduce-fp32")
"""Baselines of speed-ups: the first of these in a sweep counts."""


def check_sweep(record: dict[str, Any]) -> None:
    """Check that a record is one of a sweep.

    Raises:
        DataError: It is none.
    """
    if not {"results", "settings", "missing"} <= record.keys():
        raise DataError("record lacks results, settings or missing; expected the record of a sweep")


def find_baseline(record: dict[str, Any]) -> str | None:
    """Return the baseline of a sweep's speed-ups; None if it has none."""
    for name in BASELINES:
        if all(name in methods for methods in record["results"].values()):
            return name
    return None


def tabulate_sweep(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Tabulate milliseconds and speed-up of each method at each rate, and the bytes of a step.

    Args:
        record: Record from ``distlion_netlab.run_sweep``, or the same read from JSON.

    Returns:
        The headings, and one row for each method. A step's bytes are the count of the busiest
        host's interface, at the last rate.

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
    """Format three digits, or a whole number from 100 on."""
    if value is None:
        return "left out"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
