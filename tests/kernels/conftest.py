"""What several tests of the kernels need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiers import in_tiers


@pytest.fixture(params=in_tiers([1, 2, 3], lambda n: n == 3))
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
