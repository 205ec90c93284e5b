"""What ops that write by address owe to autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.kernels.contract import Segment


def note_writes(
    segments: Sequence[Segment], present: Sequence[int], *, param: bool, exp_avg: bool
) -> None:
    """Tell autograd, which refuses to differentiate through what has changed since."""
    written: list[Tensor] = []
    for index, segment in enumerate(segments):
        if not present[index]:
            continue
        if param:
            written.append(segment.param)
        if exp_avg and segment.grad is not None:
            written.append(segment.exp_avg)
    torch.autograd.graph.increment_version(written)
