"""All transports carry the same bytes, count them alike, and go on among those who stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cluster import run_workers
from distlion.errors import StepMismatchError, StepTimeoutError
from distlion.wire import ByteCount, Transport
from distlion.wire.gloo import LEAST_BYTES_TO_MEET
from distlion.wire.groups import own_group
from distlion.wire.tcp import link_over
from distlion.wire.transport import Transfer
from memory_link import Memory, connect_in_memory

N_WORKERS, N_BYTES = 3, 70_000
WIRES = pytest.mark.parametrize(
    "wire",
    [
        "gloo",
        pytest.param("tcp", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux")),
    ],
)
Seen: TypeAlias = list[tuple[str, ByteCount, Tensor]]


def make_row(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


class Nothing:
    """The transfer of a member that takes no part."""

    def wait(self) -> None:
        pass


def use(transport: Transport) -> Iterator[tuple[str, Transfer, Tensor]]:
    """Begin every collective; yield what it is called, its transfer, and what it overwrites."""
    n, seed = transport.n_members, 10 * transport.ranks[transport.rank]
    first = transport.rank == 0
    out = transport.empty(n, N_BYTES)
    yield "all-to-all", transport.all_to_all(out, make_row(seed, n, N_BYTES), step=1), out
    for n_bytes in (1, N_BYTES):
        out = transport.empty(n, n_bytes)
        yield "all-gather", transport.all_gather(out, make_row(seed, n_bytes), step=1), out
    out = transport.empty(n, 9)
    rows = out if first else None
    yield "gather", transport.gather(rows, make_row(seed, 9), step=1), out if first else out[:0]
    row = transport.empty(9)
    chunks = make_row(seed, n, 9) if first else None
    yield "scatter", transport.scatter(row, chunks, step=1), row
    for first_of_two in range(n - 1):  # the two give each other what differs in length
        place, peer = transport.rank - first_of_two, 2 * first_of_two + 1 - transport.rank
        if place in (0, 1):
            transport.connect(peer)
            row = transport.empty((5, 0)[place])
            yield "swap", transport.swap(row, make_row(seed, (0, 5)[place]), peer=peer, step=1), row
        else:
            yield "no swap", Nothing(), transport.empty(0)
    row = make_row(seed, 11)
    yield "broadcast", transport.broadcast(row, step=1, source=n - 1), row


def finish(
    transport: Transport, begun: tuple[str, Transfer, Tensor]
) -> tuple[str, ByteCount, Tensor]:
    name, transfer, out = begun
    transfer.wait()
    return name, transport.counted, out.clone()


def use_group(rank: int, world_size: int, wire: str) -> Seen:
    assert dist.group.WORLD is not None
    group = own_group(dist.group.WORLD, name=f"exam of {wire}", timeout_s=30.0, wire=wire)
    transport = link_over(group, timeout_s=30.0)
    return [finish(transport, begun) for begun in use(transport)]


def use_memory(ends: list[Memory]) -> list[Seen]:
    seen: list[Seen] = [[] for _ in ends]
    for begun in zip(*map(use, ends), strict=True):  # all begin before one of them waits
        for place, end in enumerate(ends):
            seen[place].append(finish(end, begun[place]))
    return seen


@pytest.mark.distributed
@WIRES
def test_both_carry_the_same_bytes_and_count_them_alike(wire: str) -> None:
    by_group = run_workers(use_group, N_WORKERS, wire)
    in_memory = use_memory(connect_in_memory(N_WORKERS))
    for found, wanted in zip(by_group, in_memory, strict=True):
        assert [name for name, *_ in found] == [name for name, *_ in wanted]
        for (name, count, out), (_, other_count, other_out) in zip(found, wanted, strict=True):
            assert torch.equal(out, other_out), name
            assert count == other_count, name


def test_in_memory_who_has_not_begun_is_named() -> None:
    first, _, third = connect_in_memory(3)
    out, row = torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    third.all_gather(out, row, step=8)
    with pytest.raises(
        StepTimeoutError, match=r"all-to-all has not begun everywhere: rank 1"
    ) as told:
        first.all_gather(out, row, step=8).wait()
    assert told.value.culprits == (1,)


def test_in_memory_who_is_missing_is_known_of_each_collective() -> None:
    first, second = connect_in_memory(2)
    out, row = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    early, late = (first.all_gather(out, row, step=8) for _ in range(2))
    second.all_gather(out, row, step=8).wait()
    early.wait()
    with pytest.raises(StepTimeoutError, match="rank 1") as told:
        late.wait()
    assert told.value.culprits == (1,)


def test_in_memory_nothing_is_kept_of_what_is_over() -> None:
    first, second = connect_in_memory(2)
    out, row = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    transfers = [end.all_gather(out, row, step=8) for end in (first, second)]
    for transfer in transfers:
        transfer.wait()
    assert not first._board.posts


def test_in_memory_another_collective_is_out_of_order() -> None:
    first, second = connect_in_memory(2)
    out, row = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    second.gather(None, row, step=8)
    with pytest.raises(StepMismatchError, match="members are at all-to-all and gather"):
        first.all_gather(out, row, step=8).wait()


def vote_beside_a_swap(rank: int, world_size: int, wire: str) -> Tensor:
    """Begin a large transfer of all while two of three members swap."""
    assert dist.group.WORLD is not None
    group = own_group(dist.group.WORLD, name=f"swaps of {wire}", timeout_s=30.0, wire=wire)
    transport, swap = link_over(group, timeout_s=30.0), None
    if rank != 1:
        transport.connect(2 - rank)
        swap = transport.swap(transport.empty(5), make_row(rank, 5), peer=2 - rank, step=1)
    out = transport.empty(world_size, LEAST_BYTES_TO_MEET)
    chunks = make_row(rank, world_size, LEAST_BYTES_TO_MEET)
    transport.all_to_all(out, chunks, step=1).wait()
    if swap is not None:
        swap.wait()
    return out


@pytest.mark.distributed
@WIRES
def test_members_without_a_peer_are_in_step_with_those_that_swap(wire: str) -> None:
    for rank, out in enumerate(run_workers(vote_beside_a_swap, N_WORKERS, wire)):
        for sender, row in enumerate(out):
            assert torch.equal(row, make_row(sender, N_WORKERS, LEAST_BYTES_TO_MEET)[rank])
