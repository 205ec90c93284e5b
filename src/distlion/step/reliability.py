"""Agreement of each worker with the majority of the others, and a warning where it is low."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

import torch

from distlion.errors import DisagreeingWorkersWarning
from distlion.step.gradients import warn_user

LOOKS = 100
"""A worker is judged by its mean agreement in so many of its last diagnosed steps."""
LARGEST_GAP = 0.05
"""A worker's mean may be this much below the median worker's. All means fall late in a run."""
LEAST_WORKERS = 3
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
    signs = torch.tensor(rows, dtype=torch.float64, device="cpu").nan_to_num(0.0).sign()
    products = signs * (signs.sum(0) - signs)
    agreed, compared = (products > 0).sum(1).tolist(), (products != 0).sum(1).tolist()
    return list(zip(agreed, compared, strict=True))


def share_agreement(counts: Sequence[Counts], n_workers: int) -> list[float | None]:
    """Return each worker's agreement on all parameters together; None without elements to compare.

    Args:
        counts: For each parameter of a step, ``count_agreement``.
        n_workers: Workers that vote.
    """
    agreed = [sum(each[worker][0] for each in counts) for worker in range(n_workers)]
    compared = [sum(each[worker][1] for each in counts) for worker in range(n_workers)]
    return [part / whole if whole else None for part, whole in zip(agreed, compared, strict=True)]


class ReliabilityWatch:
    """Name workers that agree with the others clearly less than the median worker does; each once.

    Equation:
        a_i = mean of worker i's agreement in its last ``LOOKS`` looks
        named: a_i < median(a) - ``LARGEST_GAP``

    A look compares a worker on all sampled elements of a step together. Workers with fewer looks
    are neither judged nor part of the median. The looks of a worker that was absent are older than
    the others'.

    Args:
        n_workers: Workers that vote.
        excludes: Whether votes of such workers do not count, as ``Exclusion`` decides.
    """

    def __init__(self, n_workers: int, *, excludes: bool = False) -> None:
        self._excludes = excludes
        self._shares = [deque[float](maxlen=LOOKS) for _ in range(n_workers)]
        self._named: set[int] = set()
        self._step = 0

    def observe(self, step: int, counts: Sequence[Counts]) -> None:
        """Take one look; it is none for a worker without elements to compare.

        Args:
            step: The step that was diagnosed, counted from 0.
            counts: For each parameter of the step, ``count_agreement``.
        """
        self._step = step
        for shares, share in zip(
            self._shares, share_agreement(counts, len(self._shares)), strict=True
        ):
            if share is not None:
                shares.append(share)

    def warn(self) -> None:
        """Warn of workers that have not been named before, if there are any."""
        means = {
            worker: fmean(shares)
            for worker, shares in enumerate(self._shares)
            if len(shares) == LOOKS
        }
        if len(means) < LEAST_WORKERS:
            return
        usual = median(means.values())
        low = {
            worker: mean
            for worker, mean in means.items()
            if mean < usual - LARGEST_GAP and worker not in self._named
        }
        if not low:
            return
        self._named.update(low)
        listed = ", ".join(f"worker {worker} on {mean:.1%}" for worker, mean in low.items())
        message = (
            f"too little agreement with the majority of the other workers: {listed} of the "
            f"elements compared, mean of the last {LOOKS} diagnoses up to step {self._step}. The "
            f"median worker agrees on {usual:.1%}; expected at most {100 * LARGEST_GAP:g} points "
            "less. Look for a flipped sign of the loss, wrong labels or faulty hardware there. A "
            "worker with other data, or with smaller batches, looks the same. "
            + (
                "Votes are left out while a running agreement is so low: Diagnosis.excluded."
                if self._excludes
                else "Its votes count as before."
            )
        )
        warn_user(DisagreeingWorkersWarning(message, workers=tuple(low)))
