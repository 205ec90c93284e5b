"""Votes of workers that disagree with the others do not count, for as long as they disagree."""

from __future__ import annotations

import logging
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
from disagreeing import BETA1, BETA2, LR, SIZE, Grads, make_cluster, step
from distlion.errors import DisagreeingWorkersWarning, InvalidArgumentError
from distlion.step.agreement import LARGEST_GAP
from distlion.virtual.bucket import VirtualBucket
from tiers import in_tiers


class Oracle:
    """The option in plain float arithmetic on whole votes, by its definition."""

    def __init__(self, workers: int, every: int) -> None:
        self.x = torch.zeros(SIZE)
        self.m = torch.zeros(workers, SIZE)
        self.a = [0.5] * workers
        self.out: set[int] = set()
        self._every, self._step = every, 0

    def step(self, grads: list[Tensor]) -> None:
        g = torch.stack(grads)
        signs = (self.m * BETA1 + g * (1 - BETA1)).sign()
        counted = [worker for worker in range(len(g)) if worker not in self.out]
        self.x = self.x - LR * signs[counted].sum(0).sign()
        self.m = self.m * BETA2 + g * (1 - BETA2)
        if self._step % self._every == 0:
            for worker in range(len(g)):
                others = (signs.sum(0) - signs[worker]).sign()
                is_compared = (others != 0) & (signs[worker] != 0)
                share = (others == signs[worker])[is_compared].double().mean().item()
                self.a[worker] = 0.95 * self.a[worker] + 0.05 * share
            usual = median(self.a)
            self.out = {worker for worker, a in enumerate(self.a) if a < usual - LARGEST_GAP}
        self._step += 1


@pytest.mark.filterwarnings("ignore::distlion.errors.DisagreeingWorkersWarning")
@pytest.mark.parametrize(
    ("workers", "every"), in_tiers([(3, 1), (8, 1), (8, 3)], lambda case: case != (8, 1))
)
def test_votes_count_as_the_definition_says(workers: int, every: int) -> None:
    def flips(worker: int, step: int) -> bool:
        return (worker == 1 and step < 40) or worker == 6

    cluster, param = make_cluster(workers, agreement=distlion.Agreement(every, "exclude"))
    oracle, grads = Oracle(workers, every), Grads(workers, flips)
    ever = set()
    for number in range(200):
        drawn, before = grads.draw(), frozenset(oracle.out)
        step(cluster, param, drawn)
        oracle.step(drawn)
        assert torch.allclose(param, oracle.x, rtol=0, atol=1e-5), number
        assert all(map(torch.allclose, cluster.exp_avg(1), [oracle.m[1]]))
        if number % every == 0:
            assert set(cluster.diagnostics()[-1].excluded) == before
        ever |= oracle.out

    # Who flips is left out, and returns after it has stopped.
    assert ever == {1, 6} & set(range(workers))
    assert oracle.out == {6} & set(range(workers))


def test_honest_workers_all_count_and_no_bit_changes() -> None:
    params = []
    for choice in ("exclude", "warn"):
        cluster, param = make_cluster(8, agreement=distlion.Agreement(1, choice))
        grads = Grads(8)
        for _ in range(40):
            step(cluster, param, grads.draw())
        params.append(param.detach())
        assert {each.excluded for each in cluster.diagnostics()} == {()}
    assert torch.equal(*params)


def test_of_two_workers_both_count() -> None:
    cluster, param = make_cluster(2)
    grads = Grads(2, lambda worker, step: worker == 1)
    for _ in range(40):
        step(cluster, param, grads.draw())

    assert {each.excluded for each in cluster.diagnostics()} == {()}


def test_a_vote_that_does_not_count_has_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, count = [], VirtualBucket.count

    def note(bucket: VirtualBucket, *inputs: Any) -> None:
        sent.append([bool(votes.any()) for votes in bucket.votes])
        count(bucket, *inputs)

    monkeypatch.setattr(VirtualBucket, "count", note)
    cluster, param = make_cluster(3)
    for _ in range(20):
        step(cluster, param, [torch.ones(SIZE), torch.ones(SIZE), -torch.ones(SIZE)])

    assert sent[0] == [True] * 3
    assert sent[-1] == [True, True, False]


def test_margins_are_those_of_the_votes_that_count() -> None:
    cluster, param = make_cluster(3)
    for _ in range(40):
        step(cluster, param, [torch.ones(SIZE), torch.ones(SIZE), -torch.ones(SIZE)])

    found = cluster.diagnostics()
    assert (found[0].margin, found[0].excluded) == (pytest.approx(1 / 3), ())
    assert (found[-1].margin, found[-1].excluded) == (1.0, (2,))
    # The others of a worker that agrees are one for it and one against it: a tie.
    assert found[-1].agreement_of == (None, None, 0.0)


def test_weights_count_for_those_that_are_not_left_out() -> None:
    cluster, param = make_cluster(3, weights=[1, 1, 5])
    for _ in range(40):
        step(cluster, param, [torch.ones(SIZE), torch.ones(SIZE), -torch.ones(SIZE)])

    # The heavy worker leads until it is left out.
    excluded = [each.excluded for each in cluster.diagnostics()]
    led = excluded.count(())
    assert 0 < led < 20
    assert excluded == [()] * led + [(2,)] * (40 - led)
    assert torch.allclose(param, torch.full((SIZE,), LR * (led - (40 - led))), atol=1e-5)


@pytest.mark.filterwarnings("ignore::distlion.errors.DisagreeingWorkersWarning")
def test_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    cluster, param = make_cluster(3)
    grads = Grads(3, lambda worker, step: worker == 2 and step < 20)
    with caplog.at_level(logging.WARNING, logger="distlion"):
        for _ in range(200):
            step(cluster, param, grads.draw())

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "votes of worker 2 do not count from the next step on: running agreement" in said[0]
    assert "votes of worker 2 count again" in said[1]


def test_the_warning_says_that_votes_do_not_count() -> None:
    cluster, param = make_cluster(5)
    grads = Grads(5, lambda worker, step: worker == 4)
    for _ in range(99):
        step(cluster, param, grads.draw())
    with pytest.warns(
        DisagreeingWorkersWarning, match="Votes are left out while a running agreement is so low"
    ):
        step(cluster, param, grads.draw())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum_sync": distlion.MomentumSync(every=3)}, "Leave momentum_sync out"),
        ({"clip_norm": distlion.ClipNorm(1.0, scope="global")}, "Use scope='worker', or"),
        ({"aggregation": distlion.FeedbackVote()}, "Expected a rule without memory"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        make_cluster(3, **options)
