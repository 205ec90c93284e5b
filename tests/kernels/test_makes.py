"""Makes of tensors: which others are alike, in one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distlion.errors import InvalidArgumentError
from distlion.kernels.dispatch import note_makes

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10 has no such table"
)

OTHERS: dict[str, Callable[[], object]] = {
    "dtype": lambda: torch.zeros(3, 4, dtype=torch.float16),
    "bfloat16": lambda: torch.zeros(3, 4, dtype=torch.bfloat16),
    "integers of as many bits": lambda: torch.zeros(3, 4, dtype=torch.int32),
    "shape": lambda: torch.zeros(4, 3),
    "flat": lambda: torch.zeros(12),
    "one more dim": lambda: torch.zeros(3, 4, 1),
    "empty": lambda: torch.zeros(0, 4),
    "strides": lambda: torch.zeros(4, 3).t(),
    "every other": lambda: torch.zeros(3, 8)[:, ::2],
    "expanded": lambda: torch.zeros(1, 4).expand(3, 4),
    "another device": lambda: torch.zeros(3, 4, device="meta"),
    "sparse": lambda: torch.ones(3, 4).to_sparse(),
    "None": lambda: None,
    "no tensor": lambda: [[0.0] * 4] * 3,
}
ALIKE: dict[str, Callable[[], Tensor]] = {
    "the same": lambda: torch.ones(3, 4),
    "a parameter": lambda: nn.Parameter(torch.ones(3, 4)),
    "a part of a larger one": lambda: torch.ones(5, 4)[1:4],
    "strides of another batch": lambda: torch.ones(12).view(3, 4),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_of_another_make_does_not_fit(other: str, place: int) -> None:
    makes = note_makes([torch.zeros(3, 4), torch.zeros(3, 4)])
    assert makes is not None
    given: list[object] = [torch.zeros(3, 4), torch.zeros(3, 4)]
    given[place] = OTHERS[other]()
    assert not makes.fit(given, may_be_none=False)
    assert makes.fit(given, may_be_none=True) == (other == "None")


def test_memory_that_is_gone_does_not_fit() -> None:
    makes, freed = note_makes([torch.zeros(3, 4)]), torch.zeros(3, 4)
    freed.untyped_storage().resize_(0)
    assert makes is not None
    assert not makes.fit([freed], may_be_none=False)


@pytest.mark.parametrize("other", ALIKE)
def test_what_is_of_the_same_make_fits(other: str) -> None:
    makes = note_makes([torch.zeros(3, 4)])
    assert makes is not None
    assert makes.fit([ALIKE[other]()], may_be_none=False)


def test_as_many_tensors_must_be_given() -> None:
    makes = note_makes([torch.zeros(2)])
    assert makes is not None
    assert not makes.fit([], may_be_none=True)
    assert not makes.fit([torch.zeros(2)] * 2, may_be_none=True)


def test_a_scalar_has_a_make_and_a_sparse_tensor_has_none() -> None:
    makes = note_makes([torch.tensor(1.0)])
    assert makes is not None
    assert makes.fit([torch.tensor(2.0)], may_be_none=False)
    with pytest.raises(InvalidArgumentError, match="exchange table"):
        note_makes([torch.ones(2, 2).to_sparse()])


def test_the_reference_has_no_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLION_KERNELS", "reference")
    assert note_makes([torch.zeros(2)]) is None
