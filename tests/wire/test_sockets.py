"""Groups over sockets keep what they send, and pair what members begin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlion.wire.sockets import SocketGroup, SocketWork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="own sockets need Linux")

N_BYTES = 30_000_000
"""More than the system takes before somebody reads it."""

LIMIT = timedelta(seconds=20)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> list[SocketGroup]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    make = [lambda rank=rank: SocketGroup(store, rank, 2, timeout_s=20.0) for rank in range(2)]
    return in_turns(*make)


def in_turns(*functions: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(40.0) for each in [pool.submit(function) for function in functions]]


def bytes_of(value: int, n_bytes: int = 9) -> Tensor:
    return torch.full((n_bytes,), value, dtype=torch.uint8)


def test_what_is_sent_is_kept_until_it_has_left(pair: list[SocketGroup]) -> None:
    first, second = pair
    sent = first.swap(bytes_of(0, 0), bytes_of(7, N_BYTES), 1)  # nobody else has this tensor
    assert not sent.is_completed()
    others = [bytes_of(9, N_BYTES) for _ in range(3)]
    out = bytes_of(0, N_BYTES)
    second.swap(out, bytes_of(0, 0), 0).wait(LIMIT)
    sent.wait(LIMIT)
    assert bool(out.eq(7).all())
    assert not first._held
    del others


def test_swaps_and_collectives_may_begin_in_another_order(pair: list[SocketGroup]) -> None:
    outs = [[bytes_of(0), bytes_of(0, 2)] for _ in pair]

    def use(rank: int) -> None:
        out, everybody = outs[rank]
        begin = [
            lambda: pair[rank].swap(out, bytes_of(10 + rank), 1 - rank),
            lambda: pair[rank]._allgather_base(everybody, bytes_of(20 + rank, 1)),
        ]
        for work in [each() for each in (begin if rank else reversed(begin))]:
            work.wait(LIMIT)

    in_turns(lambda: use(0), lambda: use(1))
    for rank, (out, everybody) in enumerate(outs):
        assert bool(out.eq(10 + 1 - rank).all())
        assert everybody.tolist() == [20, 21]


def test_parts_may_have_sizes_of_their_own_and_any_dtype(pair: list[SocketGroup]) -> None:
    found = [torch.zeros(5, dtype=torch.float32) for _ in pair]
    sizes = ([2, 3], [3, 2])

    def use(rank: int) -> None:
        parts = torch.arange(5, dtype=torch.float32) + 10 * rank
        pair[rank].alltoall_base(found[rank], parts, sizes[rank], sizes[rank]).wait(LIMIT)

    in_turns(lambda: use(0), lambda: use(1))
    assert found[0].tolist() == [0, 1, 10, 11, 12]
    assert found[1].tolist() == [2, 3, 4, 13, 14]


def test_a_wait_with_a_limit_ends_with_an_error(pair: list[SocketGroup]) -> None:
    work = pair[0].swap(bytes_of(0), bytes_of(1), 1)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=20))
    out = bytes_of(0)
    pair[1].swap(out, bytes_of(2), 0).wait(LIMIT)
    work.wait(LIMIT)
    assert bool(out.eq(1).all())


def test_tensors_with_gaps_are_refused(pair: list[SocketGroup]) -> None:
    with pytest.raises(RuntimeError, match="contiguous"):
        pair[0]._allgather_base(torch.zeros(2, 4)[:, ::2], torch.zeros(2))


def test_cancel_fails_what_is_under_way_on_both(pair: list[SocketGroup]) -> None:
    works = [pair[rank].swap(bytes_of(0), bytes_of(1, 0), 1 - rank) for rank in range(2)]
    pair[0].cancel()
    for work in works:
        with pytest.raises(RuntimeError, match="peer"):
            work.wait()
        assert work.is_completed()


def test_what_has_begun_is_held_whatever_comes_next(
    pair: list[SocketGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SocketWork, "__init__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair[0].swap(bytes_of(0), bytes_of(1), 1)
    assert len(pair[0]._held) == 1


def test_a_group_without_an_endpoint_closes_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("distlion.wire._endpoint.Endpoint", refuse)
    closed: list[int] = []
    monkeypatch.setattr(
        "os.close", lambda number, close=os.close: (closed.append(number), close(number))
    )
    store = dist.HashStore()  # type: ignore[attr-defined]

    def make(rank: int) -> None:
        with pytest.raises(MemoryError):
            SocketGroup(store, rank, 2, timeout_s=20.0)

    in_turns(lambda: make(0), lambda: make(1))
    assert len(closed) == 2


def test_a_fork_may_start_programs(pair: list[SocketGroup]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it waits for ever without its pipes
        made = subprocess.run(["echo", "x"], capture_output=True, preexec_fn=os.setsid, check=False)
        os._exit(0 if made.stdout == b"x\n" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(pair) == 2
