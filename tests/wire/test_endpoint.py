"""Endpoints carry chunks between peers, whatever comes first, and name the peer that ends."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

if sys.platform == "linux":
    from distlion.wire._endpoint import Endpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="own sockets need Linux")

MOST_EARLY_BYTES = 4096
LIMIT_S = 20.0
HEAD = struct.Struct("<HHIQ")
MARKER = 0x6C64


def join(n_members: int, *, most_early_bytes: int = MOST_EARLY_BYTES) -> list[Endpoint]:
    """Return the ends of members that are connected by sockets with small buffers."""
    sockets = [[-1] * n_members for _ in range(n_members)]
    for one in range(n_members):
        for other in range(one):
            for (here, there), end in zip(
                ((one, other), (other, one)), socket.socketpair(), strict=True
            ):
                sockets[here][there] = open_end(end)
    return [Endpoint(rank, each, most_early_bytes) for rank, each in enumerate(sockets)]


def open_end(end: socket.socket) -> int:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    end.setblocking(False)
    return end.detach()


def beside_stranger() -> tuple[Endpoint, socket.socket]:
    """Return an endpoint of rank 0, and the bare socket of its only peer."""
    own, peer = socket.socketpair()
    return Endpoint(0, [-1, open_end(own)], MOST_EARLY_BYTES), peer


def make(seed: int, n_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n_bytes,), dtype=torch.uint8, generator=generator)


_held: list[Tensor] = []
"""Tensors that are sent or received. A transfer uses their memory until it has ended."""


def send(end: Endpoint, peer: int, chunk: Tensor, *, stream: int = 0) -> int:
    _held.append(chunk)
    return end.begin(stream, [(peer, chunk.data_ptr(), chunk.nbytes)], [])


def receive(end: Endpoint, peer: int, out: Tensor, *, stream: int = 0) -> int:
    _held.append(out)
    return end.begin(stream, [], [(peer, out.data_ptr(), out.nbytes)])


@pytest.fixture(autouse=True)
def let_go_of_memory() -> Iterator[None]:
    yield
    _held.clear()


def await_waiting(end: Endpoint, n_threads: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while end.count_waiting() != n_threads:
        assert time.monotonic() < deadline_s


def finish(end: Endpoint, transfer: int) -> None:
    assert end.wait(transfer, LIMIT_S), "it did not end"


def at_once(*functions: Callable[[], None]) -> None:
    """Call functions in a thread each, and raise what one of them raised."""
    errors: list[BaseException] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def message(chunk: bytes, *, number: int = 0, stream: int = 0, marker: int = MARKER) -> bytes:
    return HEAD.pack(marker, stream, number, len(chunk)) + chunk


def test_chunks_larger_than_all_buffers_arrive_both_ways() -> None:
    first, second = join(2)
    sent, received = [make(seed, 3_000_001) for seed in (1, 2)], [make(0, 3_000_001) for _ in "ab"]

    def exchange(end: Endpoint, rank: int) -> None:
        peer = 1 - rank
        sends = [(peer, sent[rank].data_ptr(), sent[rank].nbytes)]
        receives = [(peer, received[rank].data_ptr(), received[rank].nbytes)]
        finish(end, end.begin(0, sends, receives))

    at_once(lambda: exchange(first, 0), lambda: exchange(second, 1))
    assert torch.equal(received[0], sent[1])
    assert torch.equal(received[1], sent[0])


def test_a_chunk_for_this_worker_is_copied() -> None:
    end = join(2)[0]
    chunk, out = make(1, 100), make(2, 100)
    pieces = [(0, chunk.data_ptr(), 100)], [(0, out.data_ptr(), 100)]
    assert end.wait(end.begin(0, *pieces), 1.0)
    assert torch.equal(out, chunk)


def test_large_chunks_move_while_nobody_waits() -> None:
    first, second = join(2)
    chunk, out = make(1, 1_000_000), make(2, 1_000_000)
    transfers = receive(second, 0, out), send(first, 1, chunk)
    deadline_s = time.monotonic() + LIMIT_S
    while first.is_under_way(transfers[1]) or second.is_under_way(transfers[0]):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert torch.equal(out, chunk)


def test_chunks_that_come_early_are_kept_in_their_order() -> None:
    first, second = join(2)
    chunks = [make(seed, 100 + seed) for seed in range(9)]
    outs = [torch.zeros_like(chunk) for chunk in chunks]
    for chunk in chunks[:-1]:
        finish(first, send(first, 1, chunk))
    # One on another stream, which comes behind all of them.
    swapped = make(99, 7)
    finish(first, send(first, 1, swapped, stream=1))
    out = torch.zeros_like(swapped)
    finish(second, receive(second, 0, out, stream=1))
    assert torch.equal(out, swapped)
    for out in outs[:-1]:
        finish(second, receive(second, 0, out))
    finish(first, send(first, 1, chunks[-1]))
    finish(second, receive(second, 0, outs[-1]))
    assert all(map(torch.equal, chunks, outs))


def test_a_chunk_half_of_which_came_early_ends_in_its_place() -> None:
    end, peer = beside_stranger()
    chunk = bytes(make(1, 3000).numpy())
    behind = message(chunk)
    nothing = torch.zeros(1, dtype=torch.uint8)
    peer.sendall(behind[:1500])
    waiting = receive(end, 1, nothing, stream=1)
    assert not end.wait(waiting, 0.05), "reads what has come"
    out = torch.zeros(3000, dtype=torch.uint8)
    transfer = receive(end, 1, out)
    assert not end.wait(transfer, 0.05)
    peer.sendall(behind[1500:])
    finish(end, transfer)
    assert bytes(out.numpy()) == chunk


def test_more_than_may_come_early_waits_at_the_sender() -> None:
    first, second, third = join(3)
    chunk = make(1, 100_000)
    outs = [torch.zeros_like(chunk) for _ in range(3)]
    sent = [send(first, 1, chunk) for _ in outs]
    other = torch.zeros(5, dtype=torch.uint8)
    waiting = receive(second, 2, other)
    assert not second.wait(waiting, 0.2)
    assert all(first.is_under_way(each) for each in sent)
    # The one who waits for another peer is not held up.
    finish(third, send(third, 1, make(2, 5)))
    finish(second, waiting)
    for out in outs:
        finish(second, receive(second, 0, out))
        assert torch.equal(out, chunk)
    for each in sent:
        finish(first, each)


def test_a_peer_that_is_held_back_and_leaves_is_lost_when_it_is_wanted() -> None:
    end, peer = beside_stranger()
    peer.sendall(message(b"x" * (MOST_EARLY_BYTES + 1))[:1000])
    nothing = torch.zeros(1, dtype=torch.uint8)
    waiting = receive(end, 1, nothing, stream=1)
    assert not end.wait(waiting, 0.05)
    peer.close()
    before_s = time.process_time()
    assert not end.wait(waiting, 0.3)
    assert time.process_time() - before_s < 0.2, "nothing is left to do meanwhile"
    out = torch.zeros(MOST_EARLY_BYTES + 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="peer 1"):
        finish(end, receive(end, 1, out))


def test_what_is_sent_to_a_peer_that_is_held_back_and_leaves_fails_at_once() -> None:
    end, peer = beside_stranger()
    peer.sendall(message(b"x" * (MOST_EARLY_BYTES + 1))[:1000])
    sending = send(end, 1, torch.zeros(1 << 24, dtype=torch.uint8))
    assert not end.wait(sending, 0.05), "it has no room for all of it"
    peer.close()
    with pytest.raises(RuntimeError, match="peer 1"):
        finish(end, sending)


def test_many_transfers_end_in_any_order_for_several_threads() -> None:
    ends = join(3, most_early_bytes=1 << 20)
    n = 60
    order = list(range(n))
    random.Random(5).shuffle(order)
    wrong: list[tuple[int, int, int]] = []

    def work(rank: int) -> None:
        peers = [each for each in range(3) if each != rank]
        outs = {key: torch.zeros(3000).byte() for key in itertools.product(peers, order)}
        chunks = {each: torch.full((3000,), 10 * rank + each % 10).byte() for each in order}
        transfers = []
        for each in range(n):
            sends = [(peer, chunks[each].data_ptr(), 3000) for peer in peers]
            receives = [(peer, outs[peer, each].data_ptr(), 3000) for peer in peers]
            transfers.append(ends[rank].begin(0, sends, receives))

        def wait(part: list[int]) -> None:
            for each in part:
                finish(ends[rank], transfers[each])
                values = {peer: 10 * peer + each % 10 for peer in peers}
                wrong.extend(
                    (rank, peer, each)
                    for peer, value in values.items()
                    if not bool(outs[peer, each].eq(value).all())
                )

        at_once(lambda: wait(order[::2]), lambda: wait(order[1::2]))

    at_once(*(lambda rank=rank: work(rank) for rank in range(3)))  # type: ignore[misc]
    assert not wrong


def test_one_who_waits_goes_on_where_another_one_is_done() -> None:
    for order in ((0, 1), (1, 0)):
        first, second = join(2)
        transfers = [receive(first, 1, torch.zeros(9, dtype=torch.uint8)) for _ in order]
        with ThreadPoolExecutor(2) as pool:
            ended = {}
            for place in order:
                ended[place] = pool.submit(finish, first, transfers[place])
                await_waiting(first, len(ended))  # the first looks at the sockets, the other waits
            for place in (0, 1):
                finish(second, send(second, 0, make(1, 9)))
                ended[place].result(LIMIT_S / 2)
                await_waiting(first, 1 - place)


def test_a_peer_that_ends_within_a_chunk_is_named_and_what_came_before_is_kept() -> None:
    end, peer = beside_stranger()
    peer.sendall(message(b"early") + message(b"never in full", number=1)[:-1])
    peer.close()
    first, second = torch.zeros(5, dtype=torch.uint8), torch.zeros(13, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="peer 1 closed its connection"):
        finish(end, receive(end, 1, torch.zeros(1, dtype=torch.uint8), stream=1))
    finish(end, receive(end, 1, first))
    assert bytes(first.numpy()) == b"early"
    with pytest.raises(RuntimeError, match="peer 1 closed its connection"):
        finish(end, receive(end, 1, second))


def test_a_chunk_for_a_peer_that_left_is_an_error() -> None:
    end, peer = beside_stranger()
    peer.close()
    large = make(1, 1_000_000)
    with pytest.raises(RuntimeError, match="peer 1"):
        finish(end, send(end, 1, large))


def test_a_transfer_among_others_goes_on_without_a_peer_that_left() -> None:
    first, second, third = join(3)
    second.cancel()
    out, chunk = torch.zeros(9, dtype=torch.uint8), make(3, 9)
    both = torch.zeros(9, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="peer 1 closed its connection"):
        finish(first, receive(first, 1, both))
    finish(third, send(third, 0, chunk))
    finish(first, receive(first, 2, out))
    assert torch.equal(out, chunk)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (message(b"12345", marker=0x4547), "no message"),
        (message(b"12345", stream=2), "no message"),
        (message(b"12345", number=1), "not the next one"),
        (message(b"1234"), "sent 4 bytes where 5 were expected"),
        (message(b"12345") * 2, "not the next one"),
        (b"GET / HTTP/1.1\r\n\r\n", "no message"),
    ],
    ids=[
        "another marker",
        "another stream",
        "one is missing",
        "another size",
        "twice",
        "a stranger",
    ],
)
def test_what_is_not_the_next_message_ends_the_connection(bad: bytes, why: str) -> None:
    end, peer = beside_stranger()
    peer.sendall(bad)
    outs = [torch.zeros(5, dtype=torch.uint8) for _ in range(2)]
    first, second = (receive(end, 1, out) for out in outs)
    if bad.startswith(message(b"12345")):
        finish(end, first)
        first = second
    with pytest.raises(RuntimeError, match=why):
        finish(end, first)


def test_a_chunk_that_came_early_with_another_size_is_an_error() -> None:
    first, second = join(2)
    finish(first, send(first, 1, make(1, 40)))
    nothing = torch.zeros(1, dtype=torch.uint8)
    assert not second.wait(receive(second, 0, nothing, stream=1), 0.05)
    with pytest.raises(RuntimeError, match="sent 40 bytes where 1 were"):
        finish(second, receive(second, 0, nothing))


def test_a_look_at_a_transfer_takes_what_has_come() -> None:
    end, peer = beside_stranger()
    transfer = receive(end, 1, torch.zeros(5, dtype=torch.uint8))
    assert end.is_under_way(transfer)
    peer.close()
    assert not end.is_under_way(transfer)
    with pytest.raises(RuntimeError, match="peer 1 closed its connection"):
        end.wait(transfer, 0.0)


def test_a_silent_peer_ends_the_wait_and_not_the_transfer() -> None:
    first, second = join(2)
    out, chunk = torch.zeros(9, dtype=torch.uint8), make(3, 9)
    transfer = receive(first, 1, out)
    began_s = time.monotonic()
    assert not first.wait(transfer, 0.1)
    assert 0.09 < time.monotonic() - began_s < LIMIT_S
    finish(second, send(second, 0, chunk))
    finish(first, transfer)
    assert torch.equal(out, chunk)


def test_cancel_ends_all_waits_at_once_on_both_sides() -> None:
    first, second = join(2)
    out = torch.zeros(9, dtype=torch.uint8)
    began = threading.Barrier(4)

    def wait(end: Endpoint, peer: int) -> None:
        transfer = receive(end, peer, out)
        began.wait()
        with pytest.raises(RuntimeError):
            end.wait(transfer, LIMIT_S)

    def cancel() -> None:
        began.wait()
        first.cancel()

    began_s = time.monotonic()
    at_once(lambda: wait(first, 1), lambda: wait(first, 1), lambda: wait(second, 0), cancel)
    assert time.monotonic() - began_s < LIMIT_S / 2
    with pytest.raises(RuntimeError, match="given up"):
        finish(first, send(first, 1, out))


def test_memory_is_not_touched_after_cancel() -> None:
    first, second = join(2)
    out = torch.zeros(1_000_000, dtype=torch.uint8)
    receive(first, 1, out)
    send(second, 0, make(1, 1_000_000))
    first.cancel()
    before = out.clone()
    with pytest.raises(RuntimeError, match="peer 0"):  # the other side has found its end
        finish(second, receive(second, 0, torch.zeros(1, dtype=torch.uint8)))
    assert torch.equal(out, before)


def test_an_endpoint_with_transfers_under_way_is_freed_at_once() -> None:
    ends = join(2)
    chunk, out = make(1, 1_000_000), torch.zeros(1_000_000, dtype=torch.uint8)
    send(ends[0], 1, chunk)
    receive(ends[0], 1, out)
    began_s = time.monotonic()
    ends.clear()
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_signal_ends_a_wait_early() -> None:
    first, _second = join(2)
    transfer = receive(first, 1, torch.zeros(9, dtype=torch.uint8))
    caught: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: caught.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began_s = time.monotonic()
        assert not first.wait(transfer, LIMIT_S)
        assert time.monotonic() - began_s < LIMIT_S / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == [signal.SIGALRM]


def test_a_fork_does_not_keep_a_connection_open() -> None:
    first, second = join(2)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        second.abandon()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        # What the fork has left in place still works here.
        chunk, out = make(1, 9), torch.zeros(9, dtype=torch.uint8)
        finish(second, send(second, 0, chunk))
        finish(first, receive(first, 1, out))
        assert torch.equal(out, chunk)
        second.cancel()
        with pytest.raises(RuntimeError, match="closed its connection"):
            finish(first, receive(first, 1, out))
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)


def test_a_fork_of_a_fork_closes_nothing_of_others() -> None:
    end = join(2)[0]
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it waits for ever without its pipes
        end.abandon()
        pipes = [os.pipe() for _ in range(4)]  # their numbers are those that were closed
        end.abandon()
        end.cancel()
        for reader, writer in pipes:
            os.write(writer, b"x")
            os.read(reader, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
