"""Agreement of each worker with the majority of the others, and a warning where it is low."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distlion.errors import DisagreeingWorkersWarning
from distlion.step import warn_user

LOOKS = 100
"""In so many diagnosed steps in a row a worker disagrees before it is named."""
LEAST_AGREEMENT = 0.45
"""Less is disagreement. Late in a run honest workers come below it too, and above it again."""
_LEAST_WORKERS = 3
"""Of two that disagree, nobody knows which one is wrong."""

Counts = Sequence[tuple[int, int]]
"""For each worker in rank order: elements that agree, and elements that were compared."""


def count_agreement(rows: Sequence[Sequence[float]]) -> Counts:
    """Count the elements on which each worker agrees with the majority of the others.

    Equation:
        s_i = sign(c_i);  r_i = sign(sum_(j != i) s_j)
        compared: s_i r_i != 0;  agreed: s_i r_i = 1

    Args:
        rows: c_i of the sampled elements, one row for each worker; NaN for a worker that is absent,
            which has no vote.

    Returns:
        Elements where the worker has no direction, or the others are tied, count in neither number.
    """
    signs = torch.tensor(rows, dtype=torch.float64).nan_to_num(0.0).sign()
    products = signs * (signs.sum(0) - signs)
    agreed, compared = (products > 0).sum(1).tolist(), (products != 0).sum(1).tolist()
    return list(zip(agreed, compared, strict=True))


@dataclass
class _Run:
    """Looks in a row in which a worker disagreed.

    Attributes:
        looks: Their number.
        agreed, compared: Elements in all of them.
        is_named: Whether a warning has named the worker.
    """

    looks: int = 0
    agreed: int = 0
    compared: int = 0
    is_named: bool = False

    def add(self, agreed: int, compared: int) -> None:
        """Take a look; one with agreement ends the run, one without elements is none."""
        if compared == 0:
            return
        if agreed >= LEAST_AGREEMENT * compared:
            self.looks = self.agreed = self.compared = 0
            return
        self.looks += 1
        self.agreed += agreed
        self.compared += compared


class ReliabilityWatch:
    """Name workers that disagree with the others in many looks in a row; each once.

    A look compares a worker on all sampled elements of a step together.

    Args:
        n_workers: Workers that vote.
    """

    def __init__(self, n_workers: int) -> None:
        self._runs = [_Run() for _ in range(n_workers)]
        self._step = 0

    def observe(self, step: int, counts: Sequence[Counts]) -> None:
        """Take one look.

        Args:
            step: The step that was diagnosed, counted from 0.
            counts: For each parameter of the step, ``count_agreement``.
        """
        self._step = step
        for worker, run in enumerate(self._runs):
            run.add(
                agreed=sum(each[worker][0] for each in counts),
                compared=sum(each[worker][1] for each in counts),
            )

    def warn(self) -> None:
        """Warn of workers that have not been named before, if there are any."""
        if len(self._runs) < _LEAST_WORKERS:
            return
        low = {
            worker: run
            for worker, run in enumerate(self._runs)
            if run.looks >= LOOKS and not run.is_named
        }
        if not low:
            return
        for run in low.values():
            run.is_named = True
        listed = ", ".join(
            f"worker {worker} on {run.agreed / run.compared:.1%}" for worker, run in low.items()
        )
        message = (
            f"too little agreement with the majority of the other workers: {listed} of the "
            f"elements compared in {LOOKS} diagnoses in a row, up to step {self._step}. Expected "
            f"{LEAST_AGREEMENT:.0%} or more. Look for a flipped sign of the loss, wrong labels or "
            "faulty hardware there. A worker whose data differ from the others' looks the same. "
            "Its votes count as before."
        )
        warn_user(DisagreeingWorkersWarning(message, workers=tuple(low)))
