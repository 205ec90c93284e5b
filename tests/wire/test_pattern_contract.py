"""Every pattern of the registry, and a toy that counts in parts, passes the same exam."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import matrix
import pattern_exam
from distlion import faults
from distlion.failures import Status
from distlion.wire import AllReduce, Exchange
from distlion.wire.frame import write_chunk
from distlion.wire.verdict import Verdict
from pattern_exam import CULPRIT, RANK, STEP, Trial


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.disarm_all()


@pytest.mark.parametrize("check", pattern_exam.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("pattern", matrix.PATTERNS.values(), ids=matrix.PATTERNS)
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
