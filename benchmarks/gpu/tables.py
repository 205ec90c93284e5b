"""The records of ``benchmarks/gpu`` as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hosts import HEADS, PARTS_HEADS, TRACE, list_parts, list_rows

Record = dict[str, Any]


def write_markdown(records: dict[str, Record]) -> str:
    """Write the records of parts, by name; the conditions that some share are said once."""
    lines = ["# Measurements on a GPU"]
    said = None
    for name, record in records.items():
        conditions = dict(record["conditions"])
        command = conditions.pop("command")
        if conditions != said:
            lines += ["", "Conditions:", ""]
            lines += [f"- {what}: {value}" for what, value in conditions.items()]
            said = conditions
        found = {what: value for what, value in record.items() if what != "conditions"}
        lines += ["", f"## {name}", "", f"`{command}`", ""]
        lines += WRITERS.get(name, write_any)(found)
    return "\n".join(lines) + "\n"


def write_any(record: Record) -> list[str]:
    return [f"- {name}: {value}" for name, value in record.items()]


def write_table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def write_ops(record: Record) -> list[str]:
    if "rows" not in record:
        return write_any(record)
    heads = (
        "op",
        "parameter",
        "momentum",
        "addresses",
        "bytes",
        "GB/s",
        "copy, GB/s",
        "share",
        "aim",
        "met",
    )
    rows = [
        (
            row["op"],
            row["param"],
            row["exp_avg"],
            row["addresses"],
            f"{row['bytes_each']:g}",
            f"{row['gb_per_s']:.0f}",
            f"{row['copy_gb_per_s']:.0f}",
            f"{row['share']:.0%}",
            "" if row["aim"] is None else f"{row['aim']:.0%}",
            {None: "", True: "yes", False: "NO"}[row["met"]],
        )
        for row in record["rows"]
    ]
    return write_table(heads, rows)


def write_steps(record: Record) -> list[str]:
    if "rows" not in record:
        return write_any(record)
    rows = [
        (
            row["optimizer"],
            f"{row['device_s'] * 1e3:.3f}",
            f"{row['host_s'] * 1e3:.3f}",
            f"{row['times_of_ours']:.2f}",
        )
        for row in record["rows"]
    ]
    missing = [f"{name}: not measured ({why})" for name, why in record["missing"].items()]
    return [
        *write_table(("optimizer", "step, ms", "of which the host, ms", "times ours"), rows),
        "",
        *missing,
    ]


def write_orthogonal(record: Record) -> list[str]:
    if "rows" not in record:
        return write_any(record)
    heads = (
        "layers",
        "width",
        "plain, ms",
        "orthogonalized, ms",
        "of which the host, ms",
        "TFLOP",
        "TFLOP/s",
        "scratch, MiB",
    )
    rows = [
        (
            row["layers"],
            row["width"],
            f"{row['plain_ms']:.3f}",
            f"{row['orthogonalized_ms']:.3f}",
            f"{row['host_ms']:.3f}",
            f"{row['tflops']:.3g}",
            f"{row['tflop_per_s']:.3g}",
            "" if row["scratch_mib"] is None else f"{row['scratch_mib']:.0f}",
        )
        for row in record["rows"]
    ]
    return write_table(heads, rows)


def write_ranks(record: Record) -> list[str]:
    if "cases" not in record:
        return write_any(record)
    heads = ("rule", "options", "buckets", "same bits", "waits", "launches and copies", "at most")
    names = ("rule", "options", "buckets", "same_bits", "waits", "launches_and_copies", "at_most")
    rows = [
        ["" if case[name] is None else case[name] for name in names] for case in record["cases"]
    ]
    return write_table(heads, [tuple(row) for row in rows])


def write_hosts(record: Record) -> list[str]:
    if not record.get("cells"):
        return write_any(record)
    errors = [found["error"] for found in (record, record.get(TRACE, {})) if "error" in found]
    lines = [*write_table(HEADS, list(list_rows(record))), "", *errors]
    parts = list(list_parts(record))
    return [*lines, *write_table(PARTS_HEADS, parts), ""] if parts else lines


def write_text(record: Record) -> list[str]:
    if not record.get("rows"):
        return write_any(record)
    heads = tuple(record["rows"][0])
    return write_table(heads, [tuple(row.values()) for row in record["rows"]])


WRITERS: dict[str, Callable[[Record], list[str]]] = {
    "ops": write_ops,
    "steps": write_steps,
    "orthogonal": write_orthogonal,
    "ranks": write_ranks,
    "hosts": write_hosts,
    "text": write_text,
}
