"""Groups as users write them: parameters that can be looked at once."""

from __future__ import annotations

import pytest
from torch import nn

import distlion


@pytest.mark.parametrize("make", [distlion.DistributedLion, distlion.Lion])
def test_generators_of_a_group_are_not_used_up_by_a_look_at_them(make) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    optimizer = make([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    optimizer.add_param_group({"params": model[2].parameters()})
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert list(map(id, held)) == list(map(id, model.parameters()))
    assert len(optimizer.state) == len(held)
