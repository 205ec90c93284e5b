"""Every pattern of the registry, and a toy that counts in parts, passes the same exam."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import matrix
import pattern_exam
from distlion import faults
from distlion.errors import InvalidArgumentError
from distlion.failures import Status
from distlion.wire import AllReduce, ByteCount, Exchange
from distlion.wire.frame import write_chunk
from distlion.wire.verdict import Verdict
from pattern_exam import CULPRIT, RANK, STEP, Trial
from two_levels import TwoLevels

EXAMINED = {**matrix.PATTERNS, "two-levels": TwoLevels()}


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.disarm_all()


@pytest.mark.parametrize("check", pattern_exam.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("pattern", EXAMINED.values(), ids=EXAMINED)
def test_pattern_keeps_the_contract(pattern: Exchange, check: Callable[[Exchange], None]) -> None:
    check(pattern)


def test_owners_that_disagree_on_presence_are_found() -> None:
    """One rank tells the first owner, with a fitting checksum, that it votes for nothing."""
    trial = Trial(AllReduce(), 3)
    shape, present = trial.shape.vote_chunk, torch.zeros(trial.shape.n_params, dtype=torch.bool)

    def forge(chunks: object) -> None:
        assert isinstance(chunks, Tensor)
        payload = chunks[0, shape.front_bytes :].clone()
        kernels = trial.links[CULPRIT].kernels
        write_chunk(kernels, chunks[0], shape, trial.headers[CULPRIT], present, payload)
        faults.disarm_all()

    fault = faults.arm(rank=RANK, step=STEP, point="framed", action=forge)
    assert trial.verdict() == Verdict(Status.CORRUPT)
    assert fault.fired == 1


def test_votes_that_cannot_be_counted_in_parts_are_refused_before_anything_is_sent() -> None:
    trial = Trial(TwoLevels(), 2)
    trial.shape = replace(trial.shape, tally_bytes=None)
    with pytest.raises(InvalidArgumentError, match="counts votes in parts"):
        trial.run()
    assert [link.counted for link in trial.links] == [ByteCount()] * 2
