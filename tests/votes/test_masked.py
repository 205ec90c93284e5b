"""A vote on directions, masked by a vote on gradients."""

from __future__ import annotations

import pytest
import torch

import distlion

LR = 1e-3


def make_cluster(
    n_elements: int, workers: int
) -> tuple[torch.nn.Parameter, distlion.VirtualCluster]:
    param = torch.nn.Parameter(torch.zeros(n_elements))
    cluster = distlion.VirtualCluster(
        [param], LR, (0.9, 0.95), workers=workers, aggregation=distlion.MaskedVote()
    )
    return param, cluster


def test_an_element_moves_only_if_both_majorities_have_one_sign() -> None:
    """In the second step momenta point up by 0.05 g, and the direction is 0.045 g + 0.1 g'."""
    param, cluster = make_cluster(4, 3)
    first = torch.tensor([[1.0, 1.0, 1.0, 1.0]] * 3)
    second = torch.tensor(
        [
            [1.0, -0.1, -0.1, -9.0],
            [1.0, -0.1, 1.0, -9.0],
            [1.0, 1.0, 1.0, 1.0],
        ]
    )
    for grads in (first, second):
        for worker, row in enumerate(grads):
            param.grad = row.clone()
            cluster.collect(worker)
        cluster.step()
    # Both majorities up; gradients down, directions up; both up; both down.
    moved = torch.tensor([-2.0, -1.0, -2.0, 0.0])
    torch.testing.assert_close(param.detach(), LR * moved)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_what_one_worker_alone_touches_follows_its_gradient(workers: int) -> None:
    """Such as the row of a rare token: the others cast random votes, twice."""
    param, cluster = make_cluster(512, workers)
    steps = 100
    for _ in range(steps):
        for worker in range(workers):
            param.grad = torch.full_like(param, float(worker == 0))
            cluster.collect(worker)
        cluster.step()
    assert float(param.detach().mean()) < -0.1 * steps * LR
