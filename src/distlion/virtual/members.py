"""The roster of virtual workers: numbers, momenta and state when some leave and others join."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.numpy_numbers import as_python
from distlion.step.newcomers import Newcomers, begin_momentum
from distlion.step.settings import Settings
from distlion.votes.roster import Roster
from distlion.wire.frame import MAX_WORKERS


def make_roster(workers: int, weights: Sequence[int] | None, settings: Settings) -> Roster:
    """Return the roster of ``workers`` workers.

    Args:
        workers: N, 1 or more.
        weights: The number of times that each worker's vote counts; None: once each.
        settings: The settings that weights must fit.

    Raises:
        InvalidArgumentError: A number is out of range, or weights do not fit a setting.
        UnsupportedTypeError: A number is not an integer.
    """
    workers = as_python(workers)
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise UnsupportedTypeError(f"workers={workers!r}: expected an integer")
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidArgumentError(f"workers={workers}: expected 1 to {MAX_WORKERS}")
    roster = Roster.of(workers)
    if weights is None:
        return roster
    return _check_weights(replace(roster, weights=tuple(weights)), settings)


def change_roster(
    before: Roster, ids: Sequence[int], weights: Sequence[int] | None, settings: Settings
) -> Roster:
    """Return the roster after a change of members.

    Args:
        before: The roster so far.
        ids: Ids of the workers, by place.
        weights: Their weights, by place; None: workers that were there keep theirs, others get 1.
        settings: The settings that weights must fit.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: As ``make_roster``, or ids repeat.
    """
    if weights is None:
        known = dict(zip(before.ids, before.weights, strict=True))
        weights = [known.get(each, 1) for each in ids]
    make_roster(len(ids), None, settings)
    roster = Roster(tuple(ids), tuple(ids), tuple(weights), before.epoch + 1)
    return _check_weights(roster, settings)


def _check_weights(roster: Roster, settings: Settings) -> Roster:
    if problem := replace(settings, weight=max(roster.weights)).find_weight_problem():
        raise InvalidArgumentError(problem)
    return roster


def reseat(
    state: Mapping[Tensor, dict[str, Tensor]],
    before: Sequence[int],
    after: Sequence[int],
    newcomers: Newcomers,
) -> None:
    """Move the state of each remaining worker to its new place, and give newcomers a momentum.

    Args:
        state: The optimizer's state: by parameter, tensors of shape (workers, *param.shape).
        before: Ids of the workers so far, by place.
        after: Ids of the workers from now on, by place.
        newcomers: The momentum that they begin with; a rule's state begins with zeros.
    """
    stay = [worker for worker in after if worker in before]
    for kept in state.values():
        for key, rows in kept.items():
            seated = rows.new_zeros(len(after), *rows.shape[1:])
            if key == "exp_avg" and stay:
                seated[:] = begin_momentum((rows[before.index(each)] for each in stay), newcomers)
            for worker in stay:
                seated[after.index(worker)] = rows[before.index(worker)]
            kept[key] = seated


def read_worker(worker: Any) -> int:
    """Return the number of a worker as Python's integer, from any type of integer.

    Raises:
        UnsupportedTypeError: It is not an integer.
    """
    if not isinstance(worker, bool):
        try:
            return int(operator.index(worker))
        except TypeError:
            pass
    raise UnsupportedTypeError(f"worker={worker!r}: expected an integer")
