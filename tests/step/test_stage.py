"""What a stage of a step has to define, and where it is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import distlion
from cluster import run_workers
from distlion.errors import InvalidArgumentError
from distlion.step.bucket import Bucket
from distlion.step.inputs import StepInputs
from distlion.step.stage import Stage


class Halving(Stage):
    """Halve all loaded gradients, which changes no sign of a direction without momentum."""

    n_buckets = 0

    def before(self, buckets: Sequence[Bucket], inputs: StepInputs) -> None:
        self.n_buckets = len(buckets)
        for bucket in buckets:
            bucket.segments = [
                each._replace(grad=None if each.grad is None else each.grad / 2)
                for each in bucket.segments
            ]


class Later(Halving):
    """Inherit a stage."""


class Silent(Stage):
    """Change nothing before votes."""


def test_a_stage_that_defines_before_needs_all_gradients() -> None:
    assert Halving.needs_all
    assert Later.needs_all
    assert not Silent.needs_all
    assert not Stage.needs_all


def train(rank: int, world_size: int) -> tuple[int, str]:
    stage, params = Halving(), [nn.Parameter(torch.ones(300)) for _ in range(2)]
    optimizer = distlion.DistributedLion.with_stages(
        [stage], params, 0.1, betas=(0.0, 0.0), bucket_elements=300
    )
    for param in params:
        param.grad = torch.full_like(param, 1.0 + rank)
    optimizer.step()
    assert all(param.eq(0.9).all() for param in params)
    with pytest.raises(InvalidArgumentError, match="Halving changes gradients") as caught:
        distlion.DistributedLion.with_stages([Halving()], params, 0.1, overlap=True)
    return stage.n_buckets, str(caught.value)


def test_a_stage_before_votes_sees_all_buckets_and_is_refused_with_overlap() -> None:
    for n_buckets, message in run_workers(train, 2, timeout_s=60):
        assert n_buckets == 2
        assert "Expected one of them" in message
