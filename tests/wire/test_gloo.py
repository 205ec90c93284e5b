"""Workers wait for each other before a large transfer, where nothing else is under way."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from distlion.errors import StepTimeoutError
from distlion.wire import ByteCount, Gloo, gloo

LARGE, SMALL = gloo.LEAST_BYTES_TO_MEET, gloo.LEAST_BYTES_TO_MEET - 1


class Work:
    """A collective that ends at once, or never."""

    def __init__(self, *, ends: bool) -> None:
        self._ends = ends

    def wait(self, _: object = None) -> bool:
        if not self._ends:
            raise RuntimeError("timed out")
        return True

    def is_completed(self) -> bool:
        return self._ends


class Group:
    """A group of three that notes the bytes of each chunk."""

    def __init__(self, *, ends: bool = True) -> None:
        self.begun: list[int] = []
        self._ends = ends

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3

    def alltoall_base(self, out: torch.Tensor, chunks: torch.Tensor, *_: Any) -> Work:
        assert out.shape == chunks.shape
        self.begun.append(chunks[0].nbytes)
        return Work(ends=self._ends)

    def _allgather_base(self, out: torch.Tensor, chunk: torch.Tensor) -> Work:
        assert out.numel() == 3 * chunk.numel()
        self.begun.append(chunk.nbytes)
        return Work(ends=self._ends)


def make_link(group: Group) -> Gloo:
    return Gloo(cast(dist.ProcessGroup, group), timeout_s=0.01)


def begin(over: Gloo, kind: str, n_bytes: int) -> gloo.GlooTransfer:
    many, one = torch.zeros(3, n_bytes, dtype=torch.uint8), torch.zeros(n_bytes, dtype=torch.uint8)
    if kind == "all-to-all":
        return over.all_to_all(many, many.clone(), step=5)
    return over.all_gather(many, one, step=5)


KINDS = pytest.mark.parametrize("kind", ["all-to-all", "all-gather"])


@KINDS
def test_large_transfer_begins_with_a_meeting(kind: str) -> None:
    group = Group()
    begin(make_link(group), kind, LARGE).wait()
    assert group.begun == [1, LARGE]


@KINDS
def test_small_transfer_begins_at_once(kind: str) -> None:
    group = Group()
    begin(make_link(group), kind, SMALL).wait()
    assert group.begun == [SMALL]


@KINDS
def test_nobody_waits_behind_what_is_under_way(kind: str) -> None:
    group = Group()
    over = make_link(group)
    first, second = begin(over, kind, LARGE), begin(over, kind, LARGE)
    assert group.begun == [1, LARGE, LARGE]
    first.wait()
    third = begin(over, kind, LARGE)
    assert group.begun == [1, LARGE, LARGE, LARGE]
    second.wait()
    third.wait()
    begin(over, kind, LARGE).wait()
    assert group.begun[4:] == [1, LARGE]


@KINDS
def test_meeting_is_not_counted(kind: str) -> None:
    over = make_link(Group())
    begin(over, kind, LARGE).wait()
    assert over.counted == ByteCount(2 * LARGE, 2 * LARGE, 2)


@KINDS
def test_worker_that_does_not_come_is_an_error_before_anything_leaves(kind: str) -> None:
    group = Group(ends=False)
    with pytest.raises(StepTimeoutError):
        begin(make_link(group), kind, LARGE)
    assert group.begun == [1]


@KINDS
def test_a_swap_of_some_members_changes_nothing_for_the_next_of_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member without a peer would meet the others alone otherwise."""
    group, pair, chunk = Group(), Group(), torch.zeros(4, 1, dtype=torch.uint8)
    monkeypatch.setattr(Gloo, "_pair", lambda *_: pair)
    link = make_link(group)
    swap = link.swap(chunk.clone(), chunk, peer=2, step=5)
    assert pair.begun == [1]
    many = begin(link, kind, LARGE)
    assert group.begun == [1, LARGE]
    swap.wait()
    many.wait()
    begin(link, kind, LARGE).wait()
    assert group.begun == [1, LARGE, 1, LARGE]
