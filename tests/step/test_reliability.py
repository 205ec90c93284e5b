"""Agreement of each worker with the majority of the others, and the warning where it is low."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import DisagreeingWorkersWarning
from distlion.step.agreement import LOOKS, ReliabilityWatch, count_agreement
from tiers import in_tiers

BETA1, BETA2 = 0.9, 0.99
SIZES = (200, 31)
"""Below 256 elements, a parameter is its own sample."""


def judge(worker: int, directions: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Count one worker's agreement as the definition says it, vote by vote."""
    agreed = compared = 0
    for element, own in enumerate(directions[worker]):
        up = sum(row[element] > 0 for other, row in enumerate(directions) if other != worker)
        down = sum(row[element] < 0 for other, row in enumerate(directions) if other != worker)
        if own == 0 or up == down:
            continue
        compared += 1
        agreed += (own > 0) == (up > down)
    return agreed, compared


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_counts_are_those_of_the_definition(workers: int) -> None:
    generator = torch.Generator().manual_seed(workers)
    # Whole numbers, so that some directions are 0 and some of the others tied.
    directions = torch.randint(-2, 3, (workers, 300), generator=generator).double().tolist()

    found = count_agreement(directions)

    assert list(found) == [judge(worker, directions) for worker in range(workers)]
    assert all(compared < 300 for _, compared in found)


def test_a_worker_that_is_absent_votes_neither_for_itself_nor_against_others() -> None:
    nan = float("nan")

    assert count_agreement([[1.0, 1.0], [nan, nan], [1.0, -1.0]]) == [(1, 2), (0, 0), (1, 2)]


class Flock:
    """Workers of a cluster with random gradients around a common one.

    Args:
        workers: Their number.
        flippers: Those that hand in the negative of their gradient.
        every: Steps between looks.
        leaning: Size of the common gradient, beside noise of size 1.
    """

    def __init__(
        self,
        workers: int,
        flippers: Sequence[int] = (),
        *,
        every: int | None = 1,
        leaning: float = 2.0,
    ) -> None:
        self.params = [nn.Parameter(torch.zeros(size)) for size in SIZES]
        named = [("first", self.params[0]), ("second", self.params[1])]
        self.cluster = distlion.VirtualCluster(
            named,
            workers=workers,
            lr=0.01,
            betas=(BETA1, BETA2),
            agreement=distlion.Agreement(every=every),
        )
        self._flippers, self._leaning = flippers, leaning
        self._generator = torch.Generator().manual_seed(workers)
        self.directions: list[list[list[float]]] = []

    def take_steps(self, count: int, *, absent: Sequence[int] = ()) -> None:
        """Step, and note each parameter's directions of the last step."""
        for left in range(count, 0, -1):
            common = [torch.randn(size, generator=self._generator) for size in SIZES]
            rows: list[list[list[float]]] = [[] for _ in SIZES]
            for worker in range(self.cluster.workers):
                sign = -1.0 if worker in self._flippers else 1.0
                for index, param in enumerate(self.params):
                    noise = torch.randn(SIZES[index], generator=self._generator)
                    grad = sign * (self._leaning * common[index] + noise)
                    if left == 1:
                        m = self.cluster.exp_avg(worker)[index]
                        rows[index].append((BETA1 * m + (1 - BETA1) * grad).tolist())
                    param.grad = grad
                if worker not in absent:
                    self.cluster.collect(worker)
            self.cluster.step()
            self.directions = rows


def test_diagnostics_show_each_worker_beside_the_others() -> None:
    flock = Flock(5, flippers=[3])
    flock.take_steps(4)

    found = flock.cluster.diagnostics()[-2:]

    assert [each.parameter for each in found] == ["first", "second"]
    for each, rows in zip(found, flock.directions, strict=True):
        counts = [judge(worker, rows) for worker in range(5)]
        assert each.agreement_of == tuple(agreed / compared for agreed, compared in counts)
    assert max(range(5), key=lambda worker: -(found[0].agreement_of[worker] or 0)) == 3


def test_who_abstains_has_no_agreement() -> None:
    flock = Flock(4)
    flock.take_steps(2, absent=[2])

    for each in flock.cluster.diagnostics():
        assert [share is None for share in each.agreement_of] == [False, False, True, False]


@pytest.fixture
def seen() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings of one kind; all others are errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", DisagreeingWorkersWarning)
        yield caught


def test_a_worker_that_flips_its_votes_is_named_once(seen: list[warnings.WarningMessage]) -> None:
    flock = Flock(8, flippers=[1, 6])

    flock.take_steps(LOOKS - 1)
    assert seen == []
    flock.take_steps(LOOKS)

    (warning,) = seen
    assert isinstance(warning.message, DisagreeingWorkersWarning)
    assert warning.message.workers == (1, 6)
    assert "worker 1 on" in str(warning.message)
    assert f"mean of the last {LOOKS} diagnoses up to step {LOOKS - 1}. " in str(warning.message)
    assert "expected at most 5 points less" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("leaning", in_tiers([0.0, 0.5, 2.0], lambda leaning: leaning == 0.5))
def test_honest_workers_are_not_named(seen: list[warnings.WarningMessage], leaning: float) -> None:
    Flock(8, leaning=leaning).take_steps(LOOKS + 5)

    assert seen == []


def test_steps_that_are_not_looked_at_do_not_count(seen: list[warnings.WarningMessage]) -> None:
    flock = Flock(8, flippers=[0], every=2)

    flock.take_steps(2 * LOOKS - 2)
    assert seen == []
    flock.take_steps(1)
    assert len(seen) == 1


def test_of_two_workers_neither_is_named(seen: list[warnings.WarningMessage]) -> None:
    Flock(2, flippers=[1]).take_steps(LOOKS + 1)

    assert seen == []


def observe(
    watch: ReliabilityWatch,
    look: int,
    own: Sequence[tuple[int, int]],
    others: Sequence[tuple[int, int]] = ((90, 100), (45, 100)),
) -> None:
    """Let worker 0 have these counts, one for each parameter, and others the same in each."""
    watch.observe(look, [[each, *others] for each in own])
    watch.warn()


def test_the_elements_of_a_look_are_judged_together(seen: list[warnings.WarningMessage]) -> None:
    """Shares of 0.3 and 0.6 are 0.45 on average, and 36 of 110 elements; others have 0.4."""
    watch = ReliabilityWatch(3)
    for look in range(LOOKS):
        observe(watch, look, [(30, 100), (6, 10)], [(9, 10), (40, 100)])

    (warning,) = seen
    assert isinstance(warning.message, DisagreeingWorkersWarning)
    assert warning.message.workers == (0,)
    assert "worker 0 on 32.7% of the elements" in str(warning.message)
    assert "The median worker agrees on 40.0%" in str(warning.message)


@pytest.mark.parametrize("agreed", [39, 40, 41])
def test_a_gap_must_be_larger_than_five_points(
    seen: list[warnings.WarningMessage], agreed: int
) -> None:
    watch = ReliabilityWatch(3)
    for look in range(LOOKS):
        # 0.1 of these looks more, so that no rounding decides between 0.4 and 0.45 - 0.05.
        observe(watch, look, [(agreed + (look < LOOKS // 10), 100)])

    assert len(seen) == (agreed == 39)


def test_the_mean_of_the_last_looks_counts(seen: list[warnings.WarningMessage]) -> None:
    """Neither one look with agreement saves a worker, nor does an old one condemn it."""
    watch = ReliabilityWatch(3)
    for look in range(LOOKS):
        observe(watch, look, [(90, 100) if look < LOOKS // 2 else (0, 100)])
    assert seen == []

    for look in range(LOOKS, LOOKS + 6):
        assert seen == []
        observe(watch, look, [(0, 100)])
    assert "worker 0 on 39.6% of the elements" in str(seen[0].message)


def test_all_may_agree_less_late_in_a_run(seen: list[warnings.WarningMessage]) -> None:
    watch = ReliabilityWatch(4)
    for look in range(2 * LOOKS):
        observe(watch, look, [(30, 100)], [(31, 100), (33, 100), (40, 100)])

    assert seen == []


def test_a_step_without_a_vote_of_a_worker_is_none_of_its_looks(
    seen: list[warnings.WarningMessage],
) -> None:
    watch = ReliabilityWatch(4)
    for look in range(LOOKS):
        own = (0, 0) if look == 7 else (1, 10)
        observe(watch, look, [own], [(9, 10), (9, 10), (9, 10)])
    assert seen == []

    observe(watch, LOOKS, [(1, 10)], [(9, 10), (9, 10), (9, 10)])
    (warning,) = seen
    assert isinstance(warning.message, DisagreeingWorkersWarning)
    assert warning.message.workers == (0,)


def test_workers_with_too_few_looks_are_not_in_the_median(
    seen: list[warnings.WarningMessage],
) -> None:
    watch = ReliabilityWatch(4)
    for look in range(LOOKS):
        observe(watch, look, [(1, 10)], [(9, 10), (9, 10), (0, 0) if look == 0 else (9, 10)])

    assert [warning.message.workers for warning in seen] == [(0,)]  # type: ignore[union-attr]
    watch = ReliabilityWatch(3)
    for look in range(LOOKS):
        observe(watch, look, [(1, 10)], [(9, 10), (0, 0) if look == 0 else (9, 10)])
    assert len(seen) == 1


def test_looks_go_on_with_more_parameters_and_begin_anew_with_other_workers(
    seen: list[warnings.WarningMessage],
) -> None:
    flock = Flock(4, flippers=[0])
    flock.take_steps(LOOKS - 1)
    flock.cluster.add_param_group({"params": [("third", nn.Parameter(torch.zeros(3)))]})
    flock.take_steps(1)
    assert len(seen) == 1

    flock.cluster.change_workers([0, 1, 2, 7])
    flock.take_steps(LOOKS - 1)
    assert len(seen) == 1
    flock.take_steps(1)
    assert len(seen) == 2


def test_a_warning_that_is_made_an_error_comes_after_the_step() -> None:
    flock, silent = Flock(4, flippers=[0]), Flock(4, flippers=[0], every=None)
    flock.take_steps(LOOKS - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DisagreeingWorkersWarning):
            flock.take_steps(1)
    flock.take_steps(1)
    silent.take_steps(LOOKS + 1)

    assert flock.cluster.committed_step == LOOKS + 1
    assert all(map(torch.equal, flock.params, silent.params))
