"""Lion Cub is DistributedLion with settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distlion
from distlion import MomentumSync, QuantizedVote


def test_lion_cub_is_a_vote_of_a_few_bits_with_averaged_momenta() -> None:
    param = nn.Parameter(torch.ones(3))

    optimizer = distlion.lion_cub([param], lr=0.5, bits=3, weight_decay=0.1, seed=4)

    assert type(optimizer) is distlion.DistributedLion
    (group,) = optimizer.param_groups
    assert group["aggregation"] == QuantizedVote(bits=3)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.9, 0.99), 0.1)
    assert optimizer._settings.momentum_sync == MomentumSync(every=100)
    assert optimizer._settings.seed == 4


def test_rule_of_lion_cub_cannot_be_replaced() -> None:
    with pytest.raises(TypeError, match="aggregation"):
        distlion.lion_cub([nn.Parameter(torch.ones(3))], aggregation=distlion.Average())
