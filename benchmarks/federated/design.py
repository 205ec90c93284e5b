"""Which runs the federated study consists of, and which of them are open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

METHODS = ("fedavg", "stochastic", "majority", "residual")
ALPHAS: tuple[float | None, ...] = (0.1, None)
"""Concentration of classes on clients; None: the same mix for all."""
PARTS = (5, 20)
"""Clients that are asked in a round."""
SEEDS, TUNING_SEED = (1, 2, 3), 0
CLIENTS, ROUNDS, TUNING_ROUNDS = 100, 200, 100
LOCAL_STEPS, BATCH, MOMENTUM, SPREAD = 10, 20, 0.9, 3.0
LOCAL_RATES = (0.02, 0.05, 0.1)
FIRST_EXPONENTS, LOWEST, HIGHEST = (-2, -1, 0), -4, 2
"""Server rates are 10 ** (exponent / 2); the grid grows while the best is at its edge."""
NETWORK = {"width": 16, "groups": 4, "shrink": 2}
LEAST_IMAGES = 10
"""Of each client."""

Record = dict[str, Any]
Read = Callable[["Cell"], Record | None]


@dataclass(frozen=True)
class Cell:
    """A run.

    Attributes:
        method: Of ``METHODS``.
        alpha: Of ``ALPHAS``.
        part: Of ``PARTS``.
        exponent: Of the server rate.
        local_rate: Of local steps.
        seed: Of the split, the weights, the clients that are drawn, their batches and their chance.
        rounds: Number of rounds, at the end of which the server rate is 0.
    """

    method: str
    alpha: float | None
    part: int
    exponent: int
    local_rate: float
    seed: int
    rounds: int

    @property
    def lr(self) -> float:
        """Server rate of the first round."""
        return float(10 ** (self.exponent / 2))

    @property
    def name(self) -> str:
        """Name of its record."""
        split = "even" if self.alpha is None else f"alpha{self.alpha}"
        rate = f"lr{self.exponent:+d}_local{self.local_rate}"
        return f"{self.method}_{split}_part{self.part}_{rate}_r{self.rounds}_s{self.seed}"


def list_open(read: Read) -> list[Cell]:
    """List the runs that can be made now; none once all are there."""
    cells, local_rate = _tune_local(read)
    if local_rate is not None:
        cells = []
        for method, alpha, part in list_conditions():
            wanted, exponent = tune(read, method, alpha, part, local_rate)
            if exponent is not None:
                wanted = [
                    Cell(method, alpha, part, exponent, local_rate, seed, ROUNDS) for seed in SEEDS
                ]
            cells += wanted
    return [cell for cell in cells if read(cell) is None]


def list_conditions() -> Iterator[tuple[str, float | None, int]]:
    """Yield method, alpha and part, the cheap and decisive ones first."""
    for part in PARTS:
        for alpha in ALPHAS:
            for method in METHODS:
                yield method, alpha, part


def choose_local_rate(read: Read) -> float | None:
    """Return the local rate of all methods, which is the best one of FedAvg; None while open."""
    return _tune_local(read)[1]


def _tune_local(read: Read) -> tuple[list[Cell], float | None]:
    cells = [
        Cell("fedavg", ALPHAS[0], PARTS[0], exponent, local_rate, TUNING_SEED, TUNING_ROUNDS)
        for local_rate in LOCAL_RATES
        for exponent in FIRST_EXPONENTS
    ]
    records = [read(cell) for cell in cells]
    scored = [
        (record["validation"], cell.local_rate)
        for cell, record in zip(cells, records, strict=True)
        if record is not None
    ]
    return cells, max(scored)[1] if len(scored) == len(cells) else None


def tune(
    read: Read, method: str, alpha: float | None, part: int, local_rate: float
) -> tuple[list[Cell], int | None]:
    """Return the runs of a grid, and the best exponent once it is known.

    The best is that of the highest validation accuracy. While it is at an edge, the grid grows by
    one there, within ``LOWEST`` and ``HIGHEST``.
    """
    exponents = list(FIRST_EXPONENTS)
    while True:
        cells = [
            Cell(method, alpha, part, exponent, local_rate, TUNING_SEED, TUNING_ROUNDS)
            for exponent in exponents
        ]
        records = [read(cell) for cell in cells]
        if any(record is None for record in records):
            return cells, None
        scores = [record["validation"] for record in records if record is not None]
        best = exponents[scores.index(max(scores))]
        if best == exponents[0] > LOWEST:
            exponents.insert(0, best - 1)
        elif best == exponents[-1] < HIGHEST:
            exponents.append(best + 1)
        else:
            return cells, best
