"""Updates that 16-bit parameters lose are warned of where most are lost, and nowhere else."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import distlion
from distlion import errors


def make(weights: list[float], lr: float, dtype: torch.dtype = torch.bfloat16) -> int:
    """Make an optimizer of one parameter; return how often it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", errors.LostUpdatesWarning)
        distlion.Lion([nn.Parameter(torch.tensor(weights, dtype=dtype))], lr=lr)
    return len(caught)


# Between 1 and 2, bfloat16 numbers are 2^-7 apart and float16 numbers 2^-10.
@pytest.mark.parametrize(("dtype", "spacing"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("weight", [1.0, 1.75, -1.25])
def test_half_of_the_spacing_is_what_counts(
    dtype: torch.dtype, spacing: float, weight: float
) -> None:
    assert make([weight], 0.49 * spacing, dtype) == 1
    assert make([weight], 0.51 * spacing, dtype) == 0
    p = nn.Parameter(torch.full((1,), 1.75, dtype=dtype))
    for lr, moves in ((0.49 * spacing, False), (0.51 * spacing, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.LostUpdatesWarning)
            optimizer = distlion.Lion([p], lr=lr)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (p.item() != 1.75) is moves


def test_the_median_weight_is_what_counts() -> None:
    assert make([1.0, 1.0, 0.001], 1e-3) == 1
    assert make([1.0, 0.001, 0.001], 1e-3) == 0
    assert make([0.0, 0.0, 1.0], 1e-30) == 0
    assert make([], 1e-3) == 0


@pytest.mark.parametrize("kind", [distlion.Lion, distlion.DistributedLion])
def test_the_warning_names_the_caller_s_line(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.warns(errors.LostUpdatesWarning) as caught:
        kind([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], lr=1e-3)
    assert [each.filename for each in caught] == [__file__]


def test_a_package_whose_name_begins_like_torch_is_a_caller() -> None:
    path = f"{Path(torch.__file__).parent}vision/models.py"
    code = compile("kind([param], lr=1e-3)", path, "exec")
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    with pytest.warns(errors.LostUpdatesWarning) as caught:
        exec(code, {"kind": distlion.Lion, "param": param})
    assert [each.filename for each in caught] == [path]


def test_float16_parameters_that_are_added_later_are_refused_as_at_construction() -> None:
    first, later = (nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.bfloat16, torch.float16))
    stochastic = distlion.Precision(rounding="stochastic")
    optimizer = distlion.DistributedLion([first], precision=stochastic)
    with pytest.raises(errors.InvalidArgumentError, match="cannot round float16"):
        optimizer.add_param_group({"params": [later]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(errors.InvalidArgumentError, match="cannot round float16"):
        distlion.DistributedLion([first, later], precision=stochastic)
