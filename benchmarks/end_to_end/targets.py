"""The goals of the measurement, and whether it meets them: rows out of the records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from parts import FOUND, JUDGED
from tables import list_records

# Rate: at least so many times as fast as DDP fp32, as DDP with the fp16 hook, as the floor.
TRAINING = {
    "100mbit": (13.0, 6.5, 0.65),
    "1gbit": (2.0, 1.5, 0.70),
    "10gbit": (0.98, 0.98, 0.70),
    "unlimited": (0.98, 0.98, 0.70),
}
# Rate: at least this share of the floor, with overlap or without, as the first steps find.
PAIR = {"100mbit": 0.85, "1gbit": 0.90}
REFERENCES = ("ddp-fp32", "ddp-fp16", "none")
# Votes with overlap on an accelerator: at least this share of the speed without communication, and
# times the speed of DDP's fp16 hook and of PowerSGD. Fixed before anything was measured.
DEVICE = {"10mbit": (0.5, 6.0, 1.0), "100mbit": (0.85, 2.0, 1.0)}
DEVICE_AT_LEAST_1GBIT = (0.9, 1.0, 1.0)
DEVICE_REFERENCES = ("none", "ddp-fp16", "ddp-powersgd")
EXCHANGE = {"100mbit": 28.0, "1gbit": 18.0, "10gbit": 12.0}
BYTES_TOLERANCE = 0.03
PREDICTION_TOLERANCE = 0.25


@dataclass(frozen=True)
class Row:
    """One line of the list: a measured value, the bound that it must keep, and whether it does.

    ``met`` is None where a bound belongs to another size than the one that was measured.
    """

    name: str
    target: str
    measured: float
    detail: str
    met: bool | None


def judge(result: dict[str, Any], *, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of those parts that were measured, as JSON can hold them."""
    rows: list[Row] = []
    for name, record in result.get("device", {}).items():
        rows += judge_device(name, record, quick=quick)
    if "training" in result:
        rows += judge_training(result["training"], quick=quick)
        rows.append(judge_bytes(result["training"]))
        rows.append(judge_predictions({"4": result["training"]}))
    if "pair" in result:
        rows += judge_pairs(result["pair"], quick=quick)
    if "exchange" in result:
        rows += judge_exchange(result["exchange"], quick=quick)
    if "scaling" in result:
        rows.append(judge_predictions(result["scaling"]))
    rows.append(judge_replicas(list_records(result)))
    return [asdict(row) for row in rows]


def judge_device(name: str, record: dict[str, Any], *, quick: bool) -> Iterator[Row]:
    for rate, methods in record["results"].items():
        bounds = DEVICE.get(rate, DEVICE_AT_LEAST_1GBIT)
        for reference, bound in zip(DEVICE_REFERENCES, bounds, strict=True):
            row = at_least(f"{name}, {rate}", bound, methods, reference, method=JUDGED[1])
            yield replace(row, met=None) if quick else row


def judge_training(record: dict[str, Any], *, quick: bool) -> Iterator[Row]:
    for rate, bounds in TRAINING.items():
        if rate not in record["results"]:
            continue
        methods = record["results"][rate]
        for reference, bound in zip(REFERENCES, bounds, strict=True):
            for method in JUDGED:
                row = at_least(rate, bound, methods, reference, method=method)
                yield replace(row, met=None) if quick else row


def judge_pairs(records: dict[str, dict[str, Any]], *, quick: bool) -> Iterator[Row]:
    for sequences, record in records.items():
        for rate, bound in PAIR.items():
            methods = record["results"].get(rate)
            if methods is not None:
                where = f"2 hosts, {sequences} sequences, {rate}"
                row = at_least(where, bound, methods, "none", method=FOUND)
                yield replace(row, met=None) if quick else row


def judge_exchange(record: dict[str, Any], *, quick: bool) -> Iterator[Row]:
    for rate, bound in EXCHANGE.items():
        methods = record["results"].get(rate)
        if methods is not None:
            where = f"{rate}, {record['n_parameters']:,} parameters"
            row = at_least(where, bound, methods, "all-reduce-fp32", method="majority-all-reduce")
            yield replace(row, met=None) if quick else row


def at_least(
    where: str, bound: float, methods: dict[str, Any], reference: str, *, method: str
) -> Row:
    name = f"{where}: {method} over {reference}"
    if method not in methods or reference not in methods:
        return Row(name, f">= {bound:g}", float("nan"), "not measured", False)
    speed_up = methods[method]["speed_up"][reference]
    detail = f"{speed_up['q1']:.2f} - {speed_up['q3']:.2f}"
    return Row(name, f">= {bound:g}", speed_up["median"], detail, speed_up["median"] >= bound)


def judge_bytes(record: dict[str, Any]) -> Row:
    """Find where interface and computation differ most, over our methods, rates and hosts."""
    worst, where = max(
        (abs(counted / computed - 1), f"{name} at {rate}, host {host}")
        for rate, methods in record["results"].items()
        for name, method in methods.items()
        if name in record["replicas_equal"]
        for host, (counted, computed) in enumerate(
            zip(method["sent_once_bytes"], method["wire_bytes"], strict=True)
        )
    )
    name = "interface, less what TCP sent again, against own count with headers, largest deviation"
    return Row(name, f"<= {BYTES_TOLERANCE:g}", worst, where, worst <= BYTES_TOLERANCE)


def judge_predictions(records: dict[str, dict[str, Any]]) -> Row:
    """Find where the cost model is furthest off, over our methods, rates and numbers of hosts."""
    worst, where = max(
        (abs(method["predicted_s"] / method["seconds"]["median"] - 1), f"{name}, {hosts}, {rate}")
        for hosts, record in records.items()
        for rate, methods in record["results"].items()
        for name, method in methods.items()
        if name in record["replicas_equal"]
    )
    name = f"predicted step time, N = {', '.join(records)}, largest deviation"
    return Row(name, f"<= {PREDICTION_TOLERANCE:g}", worst, where, worst <= PREDICTION_TOLERANCE)


def judge_replicas(records: list[dict[str, Any]]) -> Row:
    verdicts = [equal for record in records for equal in record["replicas_equal"].values()]
    share = sum(verdicts) / len(verdicts)
    return Row("share of runs with equal replicas", ">= 1", share, f"{len(verdicts)}", share == 1)
