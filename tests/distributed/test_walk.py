"""How far one must walk to follow a step: files, calls, and changes of file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import distlion
from cluster import run_workers
from distlion.wire.tcp import WIRE_VARIABLE
from drawn import set_grads

pytestmark = pytest.mark.distributed

ROOT = str(Path(distlion.__file__).parent)

MOST_FILES, MOST_CALLS, MOST_CHANGES = 18, 135, 62
"""Of a plain step; 30, 491 and 155 before the step had a package of its own. Calls that amend a
header count, as those of ``dataclasses.replace`` did not."""
MORE = {"gloo": (0, 0, 0), "tcp": (1, 16, 16)}
"""More over own sockets: the calls of wire/sockets.py, where Gloo has C++ code of torch."""


def trace_step(rank: int, world_size: int) -> list[str]:
    """Return the file of each of our calls within a step, in order."""
    params = [nn.Parameter(torch.ones(8, 8)) for _ in range(16)]
    optimizer = distlion.DistributedLion(params, lr=1e-3, exchange=distlion.AllReduce())
    for step in range(12):  # the first steps compare replicas and look at gradients
        set_grads(params, rank, step)
        optimizer.step()
    set_grads(params, rank, 4)
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            files.append(name.removeprefix(ROOT))

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert optimizer.committed_step == 13
    return files


@pytest.mark.parametrize("wire", MORE)
def test_a_plain_step_is_a_short_walk(wire: str) -> None:
    for files in run_workers(trace_step, 2, environment={WIRE_VARIABLE: wire}):
        changes = sum(files[index] != files[index - 1] for index in range(1, len(files)))
        assert "/optim/distributed_lion.py" in files
        assert len(set(files)) <= MOST_FILES + MORE[wire][0]
        assert len(files) <= MOST_CALLS + MORE[wire][1]
        assert changes <= MOST_CHANGES + MORE[wire][2]
