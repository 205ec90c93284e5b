"""A worker whose gradients are flipped is named on every rank, and no bit changes by looking."""

from __future__ import annotations

import warnings

import pytest
import torch

import distlion
from cluster import run_workers
from distlion.errors import DisagreeingWorkersWarning
from distlion.step import agreement

pytestmark = pytest.mark.distributed

FLIPPER, LOOKS = 2, 20
"""The package looks 100 times before it warns; tests/step/test_reliability.py holds it to that."""


def train(rank: int, world_size: int, every: int | None) -> tuple[list[str], list[float], str]:
    """Train on noisy gradients; return warnings with their files, and parameters."""
    agreement.LOOKS = LOOKS
    param = torch.nn.Parameter(torch.zeros(70))
    optimizer = distlion.DistributedLion(
        [("w", param)], lr=0.01, agreement=distlion.Agreement(every=every)
    )
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(LOOKS + 2):
            param.grad = 3 * torch.randn(70, generator=common) + torch.randn(70, generator=own)
            if rank == FLIPPER:
                param.grad.neg_()
            optimizer.step()
    named = [each for each in seen if isinstance(each.message, DisagreeingWorkersWarning)]
    assert [each.message.workers for each in named] == [(FLIPPER,)] * len(named)
    assert {each.filename for each in named} <= {__file__}
    messages, last = [str(each.message) for each in named], optimizer.diagnostics()[-1:]
    return messages, param.detach().tolist(), repr([each.agreement_of for each in last])


def test_every_rank_names_the_worker_that_flips_its_gradients() -> None:
    watched, silent = run_workers(train, 4, 1), run_workers(train, 4, None)

    messages, params, shares = watched[0]
    assert all(outcome == watched[0] for outcome in watched)
    assert len(messages) == 1
    assert f"worker {FLIPPER} on" in messages[0]
    assert shares.count("0.") == 4
    assert all(outcome == ([], params, "[]") for outcome in silent)


def train_strictly(rank: int, world_size: int) -> tuple[int, int]:
    """Train with warnings that are errors on rank 0 alone; return errors and committed steps."""
    agreement.LOOKS = LOOKS
    param, raised = torch.nn.Parameter(torch.zeros(70)), 0
    settings = {
        "lr": 0.01,
        "agreement": distlion.Agreement(every=1),
        "replicas": distlion.Replicas(check_every=1),
    }
    optimizer = distlion.DistributedLion([("w", param)], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 0 else "ignore")
        for step in range(LOOKS + 4):
            param.grad = torch.full((70,), -1.0 if rank == FLIPPER else 1.0) + 0.01 * (rank + step)
            try:
                optimizer.step()
            except DisagreeingWorkersWarning:
                raised += 1
    return raised, optimizer.committed_step


def test_a_warning_that_is_an_error_on_one_rank_ends_no_step() -> None:
    outcomes = run_workers(train_strictly, 4)

    assert outcomes == [(1, LOOKS + 4)] + [(0, LOOKS + 4)] * 3
