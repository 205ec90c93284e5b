"""Digests of frozen parameters that wrap other tensors, as quantized weights do."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from distlion.checkpoint.contents import digest_entries
from distlion.peers.replicas import digest_tensors


def wrap(first: float, second: float) -> TwoTensor:
    return TwoTensor(torch.full((5,), first), torch.full((5,), second))


def test_a_digest_is_that_of_all_that_is_inside() -> None:
    plain = torch.arange(4.0)
    rows = digest_tensors([plain, wrap(1, 2), wrap(1, 2), wrap(2, 1), wrap(1, 3)]).tolist()
    assert rows[0] == int(digest_tensors([plain]))
    assert rows[1] == rows[2]
    assert len(set(rows)) == 4


def test_what_a_checkpoint_leaves_out_is_compared_by_all_that_is_inside() -> None:
    digests = digest_entries({"a": wrap(1, 2), "b": wrap(1, 2), "c": wrap(1, 3)})
    assert digests[0] == digests[1] != digests[2]
