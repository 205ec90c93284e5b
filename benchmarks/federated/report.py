"""The page of the federated study: what is decided, and the tables behind it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from design import (
    ALPHAS,
    CLIENTS,
    METHODS,
    PARTS,
    ROUNDS,
    SEEDS,
    Cell,
    Read,
    Record,
    choose_local_rate,
    tune,
)

MARGIN = 1.0
"""Points of accuracy: a vote that is no further behind FedAvg counts as equal to it."""


def collect(read: Read) -> dict[tuple[str, float | None, int], list[Record]]:
    """Return the records of the reported runs, as far as all seeds of a condition are there."""
    local_rate, found = choose_local_rate(read), {}
    if local_rate is None:
        return {}
    for part in PARTS:
        for alpha in ALPHAS:
            for method in METHODS:
                _, exponent = tune(read, method, alpha, part, local_rate)
                if exponent is None:
                    continue
                cells = [
                    Cell(method, alpha, part, exponent, local_rate, seed, ROUNDS) for seed in SEEDS
                ]
                records = [read(cell) for cell in cells]
                done = [record for record in records if record is not None]
                if len(done) == len(cells):
                    found[method, alpha, part] = done
    return found


def compare(records: Sequence[Record], others: Sequence[Record]) -> list[float]:
    """Return differences of test accuracy in points, seed by seed."""
    pairs = zip(records, others, strict=True)
    return [100 * (one["test"] - other["test"]) for one, other in pairs]


def choose_default(found: dict[tuple[str, float | None, int], list[Record]]) -> str:
    """Return what ships as the default, by the rule of the protocol; "open" without all runs."""
    alpha = ALPHAS[0]
    wanted = [(method, alpha, part) for method in METHODS for part in PARTS]
    if any(key not in found for key in wanted):
        return "open"

    def trail(method: str) -> float:
        """Return the most points by which it trails FedAvg, mean over seeds."""
        return max(
            -statistics.fmean(compare(found[method, alpha, part], found["fedavg", alpha, part]))
            for part in PARTS
        )

    votes = [method for method in METHODS if method != "fedavg"]
    for method in sorted(votes, key=lambda each: (each != "stochastic", trail(each))):
        if trail(method) <= MARGIN:
            return method
    return "none"


def describe(read: Read) -> str:
    """Write the page."""
    found = collect(read)
    lines = [
        "# Votes of clients and FedAvg",
        "",
        f"CIFAR-10, {CLIENTS} clients, {ROUNDS} rounds, {len(SEEDS)} seeds; test accuracy in %, "
        "mean ± standard deviation. By the [protocol](../../studies/federated-protocol.md). "
        "The test set has 5,000 images. The local rate lies at "
        "the edge of its grid, and tuning's records hold a test accuracy that chose nothing.",
        "",
        "| method | bytes up | "
        + " | ".join(f"{_name(alpha)}, {part} a round" for part in PARTS for alpha in ALPHAS)
        + " |",
        "|---|---:|" + "---:|" * (len(PARTS) * len(ALPHAS)),
    ]
    for method in METHODS:
        rows = [found.get((method, alpha, part)) for part in PARTS for alpha in ALPHAS]
        size = next((f"{row[0]['payload_bytes']:,}" for row in rows if row), "")
        lines.append(f"| {method} | {size} | " + " | ".join(map(_show, rows)) + " |")
    lines += ["", f"Default by the rule of the protocol: {choose_default(found)}.", ""]
    return "\n".join(lines)


def _name(alpha: float | None) -> str:
    return "even" if alpha is None else f"alpha {alpha:g}"


def _show(row: Sequence[Record] | None) -> str:
    if row is None:
        return "open"
    scores = [100 * record["test"] for record in row]
    return f"{statistics.fmean(scores):.1f} ± {statistics.stdev(scores):.1f}"
