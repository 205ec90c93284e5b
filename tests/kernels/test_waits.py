"""No op waits for the device: what it computes is read by those who call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from backends import CUDA, HAS_CUDA, REFERENCE
from conformance import Memory
from kernel_cases import all_ops
from tiers import in_tiers

META = torch.device("meta")
# The reference sums up on the host, as its contract says.
OPS = dict(all_ops(sizes=(65, 0, 1000)))


@contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Raise where the host waits: tensors on the meta device have nothing to read."""
    if device == META:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Moved(Memory):
    """Tensors are made as they are, and lie on the device."""

    def place(self, values: Tensor, device: torch.device | None = None) -> Tensor:
        return values.to(device or self.device, non_blocking=True)


@pytest.mark.parametrize(
    "device",
    [
        META,
        pytest.param(
            CUDA,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"),
            ],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", in_tiers(OPS, lambda case: list(OPS).index(case) % 3 == 0))
def test_the_reference_never_waits_for_the_device(case: str, device: torch.device) -> None:
    with watched(device):
        result = OPS[case](REFERENCE, torch.Generator().manual_seed(0), Moved(device))
    results = [] if result is None else [result] if isinstance(result, Tensor) else result
    assert all(tensor.device.type == device.type for tensor in results)


def test_a_read_would_be_seen() -> None:
    with watched(META), pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.zeros((), device=META))
