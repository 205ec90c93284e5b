"""Agreement of workers with the vote: how reliable each is, and whose votes do not count."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

import torch

from distlion.errors import DisagreeingWorkersWarning, InvalidArgumentError
from distlion.numpy_numbers import keep_as_python
from distlion.step.arguments import check_choice, check_count
from distlion.step.gradients import warn_user

logger = logging.getLogger("distlion")

AGREEMENT_KEY = "agreement"
"""Key of the first param group with each worker's running agreement: by its id, as text; in saved
states a list in rank order, since ids mean nothing to a crew that is formed later."""
_FIRST = 0.5
_DECAY = 0.95


@dataclass(frozen=True)
class Agreement:
    """Measure how far workers agree, at intervals; see ``optimizer.diagnostics()``.

    Args:
        every: Steps between measurements, 1 or more; None: never.
        on_disagreement: "warn" of workers that agree with the majority of the others clearly less
            than the median worker does, or "exclude": their votes do not count either, while that
            lasts. "exclude" needs ``every``, such as 10.

    Raises:
        InvalidArgumentError: A value is out of range, or there is nothing to exclude by.
        UnsupportedTypeError: ``every`` is not an integer.

    Notes:
        A measurement takes a sample of at most 256 elements of each parameter. It changes no bit of
        the training, unless workers are excluded. "exclude" goes with neither ``momentum_sync``
        nor ``ClipNorm(scope="global")``, which are means over all workers, nor with a rule that
        keeps what workers sent in earlier steps.
    """

    every: int | None = None
    on_disagreement: Literal["warn", "exclude"] = "warn"

    def __post_init__(self) -> None:
        keep_as_python(self, "every")
        check_count("Agreement.every", self.every, or_none=True)
        check_choice("Agreement.on_disagreement", self.on_disagreement, ("warn", "exclude"))
        if self.excludes and self.every is None:
            raise InvalidArgumentError(
                f"{self} measures nothing to exclude workers by. Expected a number of steps "
                "between two measurements. Use Agreement(every=10, on_disagreement='exclude')"
            )

    @property
    def excludes(self) -> bool:
        """True if votes of workers that disagree do not count."""
        return self.on_disagreement == "exclude"


class Exclusion:
    """Leave out workers that agree with the others clearly less than the median worker does.

    Equation:
        a_i <- 0.95 a_i + 0.05 share_i, from 0.5 for all
        left out of the next votes: a_i < median_j(a_j) - ``LARGEST_GAP``

    share_i is a worker's agreement with the majority of the others on all sampled elements of a
    step. It is measured for workers that are left out too, so that they return. A worker that was
    absent, or is new, begins with the median of the others. The median worker is never left out.

    Args:
        groups: Param groups; the first one keeps the running agreements.
        voters: Ids of the workers that vote, in rank order.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], voters: Sequence[int]) -> None:
        self._groups, self._names = groups, [str(voter) for voter in voters]
        self._changes: list[str] = []
        saved = groups[0].get(AGREEMENT_KEY, ())
        if not isinstance(saved, Mapping):
            # Of another number of workers nobody knows who is who.
            fits = len(saved) == len(self._names)
            groups[0][AGREEMENT_KEY] = dict(zip(self._names, saved, strict=True)) if fits else {}
            low = ", ".join(map(str, sorted(self.find_excluded())))
            self._changes += [f"votes of workers {low} do not count, as when saved"] if low else []
        self._write(self._read())

    def find_excluded(self) -> frozenset[int]:
        """Find the workers whose next votes do not count, by place."""
        return _find_low(self._read())

    def observe(self, step: int, counts: Sequence[Counts], absent: Collection[int]) -> None:
        """Take one look.

        Args:
            step: The step that was diagnosed, counted from 0.
            counts: For each parameter of the step, ``count_agreement``. A worker without elements
                to compare keeps its running agreement.
            absent: Places of workers without any vote.
        """
        before = self._read()
        shares = share_agreement(counts, len(before))
        now = [
            mean if share is None else _DECAY * mean + (1 - _DECAY) * share
            for mean, share in zip(before, shares, strict=True)
        ]
        if others := [mean for place, mean in enumerate(now) if place not in absent]:
            first = median(others)
            now = [first if place in absent else mean for place, mean in enumerate(now)]
        self._write(now)
        self._note_changes(step, before, now)

    def _note_changes(self, step: int, before: Sequence[float], now: Sequence[float]) -> None:
        low = _find_low(now)
        for place in sorted(_find_low(before) ^ low):
            count = "do not count from the next step on" if place in low else "count again"
            self._changes.append(
                f"[step {step}] votes of worker {place} {count}: running agreement with the "
                f"majority of the others {now[place]:.1%}, of the median worker {median(now):.1%}"
            )

    def log_changes(self) -> None:
        """Log the changes since the last call; between steps, as a logger may raise."""
        changes, self._changes = self._changes, []
        for change in changes:
            logger.warning("%s", change)

    def _write(self, means: Sequence[float]) -> None:
        self._groups[0][AGREEMENT_KEY] = dict(zip(self._names, means, strict=True))

    def _read(self) -> list[float]:
        """Read the running agreements from the param group, by place."""
        saved: Mapping[str, float] = self._groups[0].get(AGREEMENT_KEY, {})
        known = [saved[name] for name in self._names if name in saved]
        first = median(known) if known else _FIRST
        return [saved.get(name, first) for name in self._names]


def _find_low(means: Sequence[float]) -> frozenset[int]:
    if len(means) < LEAST_WORKERS:
        return frozenset()
    least = median(means) - LARGEST_GAP
    return frozenset(place for place, mean in enumerate(means) if mean < least)


def is_agreement(value: object) -> bool:
    """Return whether a saved value can be a list of running agreements."""
    return isinstance(value, list) and all(
        isinstance(mean, float) and 0 <= mean <= 1 for mean in value
    )


def export_agreement(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved group keeps in place of running agreements by id."""
    kept = group.get(AGREEMENT_KEY)
    return {AGREEMENT_KEY: list(kept.values())} if isinstance(kept, Mapping) else {}


def describe_agreement(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """List a line with the running agreements, if there are any."""
    kept = groups[0].get(AGREEMENT_KEY)
    return [] if kept is None else [f"agreement of workers: {kept!r}"]


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
