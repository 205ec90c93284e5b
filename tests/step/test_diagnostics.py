"""How far workers agree: the figures, against a plain count of everything."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import distlion
import matrix
from distlion.kernels import orthogonalize
from distlion.step import Diagnosis
from distlion.step.agreement import count_agreement
from distlion.step.diagnostics import ABSENT, diagnose
from distlion.votes import Aggregation
from drawn import set_grads

BETA1 = 0.9


def compare(step: int, name: str, rows: list[list[float]], updates: list[int]) -> Diagnosis | None:
    """Diagnose with the counts of the same directions."""
    counts = count_agreement([row[: len(updates)] for row in rows])
    return diagnose(step, name, rows, updates, counts=counts)


def test_margin_ties_agreement_and_coherence_of_three_coordinates() -> None:
    # Directions of three workers, then their momenta.
    rows = [[1.0, -2.0, 0.5, 1.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0, 1.0, 0.0],
            [-1.0, -1.0, -0.5, 0.0, 0.0, 1.0]]  # fmt: skip

    found = compare(4, "weight", rows, updates=[1, 1, 1])

    # Sums of signs: 1, -1, 0; of directions: 3, -2, 0.
    assert found == Diagnosis(
        4,
        "weight",
        margin=pytest.approx(2 / 9),
        ties=pytest.approx(1 / 3),
        agreement=0.5,
        coherence=pytest.approx(1 / 3),
        # Others' sums of signs: 0, 0, -1; 0, -2, 0; 2, 0, 1. Elements of both: 1 wrong, 1, 2.
        agreement_of=(0.0, 0.0, 0.0),
    )


def test_absent_workers_do_not_vote_but_have_momenta() -> None:
    rows = [[1.0, 1.0], [ABSENT, 1.0], [1.0, 1.0]]

    found = compare(0, "weight", rows, updates=[1])

    assert found is not None
    assert (found.margin, found.ties, found.agreement) == (1.0, 0.0, 1.0)
    assert found.agreement_of == (1.0, None, 1.0)
    assert found.coherence == pytest.approx(1.0)


def test_nothing_is_said_where_nobody_votes() -> None:
    assert compare(0, "weight", [[ABSENT, 1.0]] * 2, updates=[1]) is None
    assert compare(0, "weight", [[], []], updates=[]) is None


@pytest.mark.parametrize("rule", matrix.LISTED.values(), ids=matrix.LISTED)
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("cautious", [False, True])
def test_agreement_is_counted_on_what_was_really_applied(
    rule: Aggregation, workers: int, cautious: bool
) -> None:
    """A parameter of 200 coordinates is its own sample; steps are read off the parameters."""
    param = nn.Parameter(torch.zeros(200))
    cluster = distlion.VirtualCluster(
        [("w", param)],
        workers=workers,
        lr=1.0,
        cautious=cautious,
        aggregation=rule,
        agreement=distlion.Agreement(every=2),
    )
    generator = torch.Generator().manual_seed(workers)
    expected = []
    for step in range(6):
        grads = torch.randn(workers, 200, generator=generator)
        momenta = torch.stack([cluster.exp_avg(worker)[0] for worker in range(workers)])
        directions = BETA1 * momenta.double() + (1 - BETA1) * grads.double()
        if cautious:
            directions[directions * grads.double() <= 0] = 0
        before = param.detach().clone()
        for worker, grad in enumerate(grads):
            param.grad = grad
            cluster.collect(worker)
        cluster.step()
        votes = directions.sign().sum(0)
        moved = (before - param.detach()).sign()
        leads = directions.sum(0).sign()
        agreement = (moved == leads)[leads != 0].double().mean()
        expected.append(
            (step, votes.abs().mean() / workers, (votes == 0).double().mean(), agreement)
        )

    found = cluster.diagnostics()

    assert [each.step for each in found] == [0, 2, 4]
    for each, (step, margin, ties, agreement) in zip(found, expected[::2], strict=True):
        assert (each.step, each.parameter) == (step, "w")
        assert each.margin == pytest.approx(float(margin))
        assert each.ties == pytest.approx(float(ties))
        assert each.agreement == pytest.approx(float(agreement))
    if rule == distlion.FullPrecision():
        assert all(each.agreement == 1 for each in found)
    assert found[0].coherence == 1  # all momenta are 0
    assert math.isclose(found[2].coherence, 1 / workers, rel_tol=0.5)


def test_agreement_on_a_matrix_is_that_of_orthogonalized_directions() -> None:
    param = nn.Parameter(torch.zeros(10, 20))
    cluster = distlion.VirtualCluster(
        [{"params": [("w", param)], "orthogonalize": True}],
        workers=3,
        lr=1.0,
        agreement=distlion.Agreement(every=1),
    )
    for step in range(3):
        directions = []
        for worker in range(3):
            set_grads([param], worker, step)
            assert param.grad is not None
            [momentum] = cluster.exp_avg(worker)
            directions.append(orthogonalize(BETA1 * momentum + (1 - BETA1) * param.grad))
            cluster.collect(worker)
        before = param.detach().clone()
        cluster.step()
        leads = torch.stack(directions).sum(0).sign()
        agreement = ((before - param.detach()).sign() == leads).double().mean()
        votes = torch.stack(directions).sign().sum(0)
        found = cluster.diagnostics()[-1]
        assert found.margin == pytest.approx(float(votes.abs().mean() / 3))
        assert found.agreement == pytest.approx(float(agreement))


def test_diagnosis_changes_nothing() -> None:
    results = []
    for every in (None, 1):
        param = nn.Parameter(torch.zeros(300))
        cluster = distlion.VirtualCluster(
            [param], workers=3, agreement=distlion.Agreement(every=every)
        )
        for step in range(4):
            for worker in range(3):
                set_grads([param], worker, step)
                cluster.collect(worker)
            cluster.step()
        results.append((param.detach(), cluster.diagnostics()))

    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == []
    assert len(results[1][1]) == 4
