"""Small all-to-alls travel together, from when one of them is waited for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion.errors import StepTimeoutError
from distlion.step.bucket import Pipeline
from distlion.wire.gloo import Gloo
from distlion.wire.pattern import Exchanging
from distlion.wire.sharing import MOST_BYTES_TO_SHARE, SharedTransfer
from distlion.wire.transport import MOST_BYTES_AT_ONCE, Transfer

SMALL = torch.arange(6, dtype=torch.uint8).view(2, 3)


class Starts:
    """Notes each transfer that begins, and exchanges nothing: what is sent is received."""

    def __init__(self, *, fails: bool = False) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.waits, self._fails = 0, fails

    is_held = False

    def __call__(self, out: Tensor, chunks: Tensor, *, n_parts: int) -> Transfer:
        self.sizes.append((chunks.shape[1], n_parts))
        self._out, self._chunks = out, chunks
        return self

    def begin(self) -> None:
        """Do nothing, as it has begun."""

    def wait(self) -> None:
        self.waits += 1
        if self._fails:
            raise StepTimeoutError("silent", rank=0, step=3)
        self._out.copy_(self._chunks)


def test_nothing_is_sent_before_somebody_waits_and_then_all_at_once() -> None:
    starts = Starts()
    shared, outs = SharedTransfer(starts), [torch.zeros_like(SMALL), torch.zeros(2, 5).byte()]
    shared.add(outs[0], SMALL)
    shared.add(outs[1], torch.full((2, 5), 9, dtype=torch.uint8))
    assert shared.is_held
    assert starts.sizes == []
    shared.wait()
    shared.wait()
    assert not shared.is_held
    assert starts.sizes == [(8, 2)]
    assert starts.waits == 1
    assert torch.equal(outs[0], SMALL)
    assert outs[1].eq(9).all()


def test_a_transfer_that_nobody_joins_is_not_copied() -> None:
    starts, out = Starts(), torch.zeros_like(SMALL)
    shared = SharedTransfer(starts)
    shared.add(out, SMALL)
    shared.begin()
    shared.begin()
    assert starts.sizes == [(3, 1)]
    assert starts._chunks is SMALL
    assert starts._out is out


def test_each_of_them_fails_if_their_message_does() -> None:
    shared = SharedTransfer(Starts(fails=True))
    shared.add(torch.zeros_like(SMALL), SMALL)
    for _ in range(2):
        with pytest.raises(StepTimeoutError, match="silent"):
            shared.wait()


def send(link: Gloo, n_bytes: int, fill: int) -> tuple[Transfer, Tensor]:
    out = link.empty(link.n_members, n_bytes)
    chunks = torch.full((link.n_members, n_bytes), fill, dtype=torch.uint8)
    return link.all_to_all(out, chunks, step=1), out


def run_links(rank: int, world_size: int) -> dict[str, object]:
    """Large transfers begin at once, and so do small ones that are enough together."""
    assert dist.group.WORLD is not None
    shared = Gloo(dist.group.WORLD, timeout_s=20, shares=True)
    plain = Gloo(dist.group.WORLD, timeout_s=20)
    n_full = MOST_BYTES_TO_SHARE // MOST_BYTES_AT_ONCE
    small = [send(shared, MOST_BYTES_AT_ONCE, rank + 10 * each)[0] for each in range(n_full - 1)]
    held = [transfer.is_held for transfer in small]
    last, received = send(shared, MOST_BYTES_AT_ONCE, rank + 90)
    full = [transfer.is_held for transfer in (*small, last)]
    large, _ = send(shared, MOST_BYTES_AT_ONCE + 1, rank)
    later, _ = send(shared, 5, rank)
    at_once, _ = send(plain, 5, rank)
    for transfer in (last, large, later, at_once):
        transfer.wait()
    return {
        "held": held,
        "full": full,
        "large": large.is_held,
        "plain": at_once.is_held,
        "rows": received[:, 0].tolist(),
        "messages": shared.counted.messages,
    }


def test_small_transfers_of_one_link_are_held_until_they_are_many() -> None:
    for found in run_workers(run_links, 2, timeout_s=60):
        assert found["held"] and all(found["held"])  # type: ignore[arg-type]
        assert not any(found["full"])  # type: ignore[arg-type]
        assert not found["large"]
        assert not found["plain"]
        assert found["rows"] == [90, 91]
        assert found["messages"] == 4 + 1 + 1, "one for each chunk"


def count_all_to_alls(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Steps with several small buckets, with and without overlap: messages and equal replicas."""
    found = []
    for overlap in (False, True):
        params = [nn.Parameter(torch.ones(700)) for _ in range(6)]
        optimizer = distlion.DistributedLion(
            params, 0.1, exchange=distlion.AllReduce(), bucket_elements=700, overlap=overlap
        )
        calls: list[int] = []
        link = optimizer._session.routing.between
        send_to_all = link._send_to_all  # type: ignore[union-attr]

        def note(*args: object, send=send_to_all, calls=calls, **more: object) -> object:  # type: ignore[no-untyped-def]
            calls.append(1)
            return send(*args, **more)

        link._send_to_all = note  # type: ignore[union-attr]
        for step in range(3):
            torch.manual_seed(10 * rank + step)
            sum((param * torch.randn(700)).sum() for param in params).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.verify_replicas()
        found.append((len(calls) // 3, len(optimizer._session.routing.buckets) == 6))
    return found


def test_many_small_buckets_take_two_messages_or_one_each_during_backward() -> None:
    for found in run_workers(count_all_to_alls, 2, timeout_s=60):
        assert found == [(2, True), (7, True)]


def test_an_exchange_whose_transfer_is_held_waits_for_the_others() -> None:
    log: list[str] = []

    def exchange(name: str, shared: SharedTransfer) -> Exchanging[str]:
        shared.add(torch.zeros_like(SMALL), SMALL)
        yield shared
        shared.wait()
        log.append(name)
        return name

    starts = Starts()
    shared, pipeline = SharedTransfer(starts), Pipeline[str]()
    for name in "abc":
        pipeline.add(exchange(name, shared))
    assert (log, starts.sizes) == ([], [])
    assert pipeline.drain() == ["a", "b", "c"]
    assert (log, starts.sizes) == (["a", "b", "c"], [(9, 3)])


def test_a_pipeline_with_time_to_spare_sends_each_bucket_alone() -> None:
    starts, log = Starts(), list[str]()
    pipeline, shares = Pipeline[str](at_once=True), [SharedTransfer(starts)]

    def exchange(name: str) -> Exchanging[str]:
        for _ in range(2):
            if not shares[-1].is_held:
                shares.append(SharedTransfer(starts))
            shared = shares[-1]
            shared.add(torch.zeros_like(SMALL), SMALL)
            yield shared
            shared.wait()
        log.append(name)
        return name

    pipeline.add(exchange("a"))
    assert starts.sizes == [(3, 1)]
    pipeline.add(exchange("b"))
    assert starts.sizes == [(3, 1), (6, 2)], "the second votes, and the first replies"
    assert pipeline.drain() == log == ["a", "b"]
    assert starts.sizes[2:] == [(3, 1)]
