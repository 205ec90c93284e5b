"""Fault points."""

from collections.abc import Iterator

import pytest

from distlion import faults
from distlion.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.disarm_all()


def test_a_fault_fires_at_its_rank_step_and_point_only() -> None:
    seen: list[object] = []
    fault = faults.arm(rank=1, step=5, point="before_commit", action=seen.append)
    for rank, step, point in [(0, 5, "before_commit"), (1, 4, "before_commit")]:
        faults.fire(rank=rank, step=step, point=point, subject="no")  # type: ignore[arg-type]
    faults.fire(rank=1, step=5, point="before_commit", subject="yes")
    assert seen == ["yes"]
    assert fault.fired == 1


def test_an_unknown_point_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="before_lunch"):
        faults.arm(rank=0, step=0, point="before_lunch", action=print)  # type: ignore[arg-type]
