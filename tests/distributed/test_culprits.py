"""What an error says of a failure: who, why and when, and nobody who only left because of it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError, run_workers
from distlion import errors
from distlion.wire.groups import tidy
from failures import (
    Caught,
    assert_raised,
    await_waits,
    caught,
    give_time,
    lose_patience,
    make_optimizer,
    note_wait,
    set_grads,
)

pytestmark = pytest.mark.distributed

kept: list[distlion.DistributedLion] = []


def meet_at_rank_0(rank: int, world_size: int) -> list[int]:
    """Let a store that rank 0 keeps replace the one of the test; return everybody's process id."""
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
    own = torch.tensor([0 if store is None else store.port, os.getpid()])
    everybody = own.new_empty(world_size, 2)
    dist.all_gather(list(everybody), own)
    dist.destroy_process_group()
    if store is None:
        store = dist.TCPStore("127.0.0.1", int(everybody[0, 0]), world_size, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return everybody[:, 1].tolist()


def hold_up(fifo: str) -> None:
    """Keep the interpreter from running any thread until everybody who writes there has left."""
    libc = ctypes.PyDLL(None)  # unlike CDLL, it does not let go of the interpreter
    opened = libc.open(fifo.encode(), os.O_RDONLY)
    assert libc.read(opened, ctypes.create_string_buffer(1), 1) == 0


def leave_one_by_one(rank: int, world_size: int, fifo: str) -> Caught | None:
    """Rank 1 is killed; rank 0, which keeps the store, fails and leaves; rank 2 saw none of it."""
    processes = meet_at_rank_0(rank, world_size)
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    optimizer.step()
    if rank == 0:
        os.open(fifo, os.O_WRONLY)  # once rank 2 is held up; the system closes it at the end
        os.kill(processes[1], signal.SIGKILL)
    elif rank == 2:
        hold_up(fifo)
    set_grads(optimizer, 1, rank)
    if rank == 1:
        signal.pause()
    found = caught(optimizer, optimizer.step)
    if rank == 0:
        os._exit(0)
    return found


def test_a_rank_that_kept_the_store_and_left_after_a_failure_is_not_blamed(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    host, killed, found = run_workers(leave_one_by_one, 3, fifo, may_die=True)
    assert isinstance(host, WorkerDiedError)
    assert isinstance(killed, WorkerDiedError)
    raised = assert_raised(
        found, errors.PeerLostError, "store .* is gone too", "may have left after somebody else"
    )
    assert raised.culprits == ()
    assert raised.unchanged


def lose_rank_1(rank: int, world_size: int) -> Caught | None:
    give_time()
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    if rank == 1:
        os._exit(0)
    return caught(optimizer, optimizer.step)


def test_a_lost_peer_is_told_without_the_source_path_of_gloo() -> None:
    first, _, last = run_workers(lose_rank_1, 3, may_die=True)
    for found in (first, last):
        raised = assert_raised(found, errors.PeerLostError, "rank 1 is gone")
        assert raised.culprits == (1,)
        assert not re.search(r"\.cc:|gloo/|GLHF|\[/", raised.text)


@pytest.mark.parametrize(
    ("said", "tidied"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
            "[127.0.0.1]:4711\nmore",
            "Connection closed by peer [127.0.0.1]:4711",
        ),
        (
            "[enforce fail at ../third_party/gloo/gloo/context.cc:12] x. y",
            "x",
        ),
        (
            "Read error [127.0.0.1]:4711: Connection reset by peer. Look",
            "Read error [127.0.0.1]:4711: Connection reset by peer",
        ),
        ("Timed out", "Timed out"),
    ],
)
def test_what_torch_says_is_told_in_one_sentence(said: str, tidied: str) -> None:
    assert tidy(RuntimeError(said)) == tidied


def wait_in_vain(rank: int, world_size: int) -> Caught | None:
    """Rank 1 does not come; of the others, rank 0 has the shorter patience."""
    give_time()
    optimizer = make_optimizer(timeouts=distlion.Timeouts(step_s=40, busy_s=20))
    kept.append(optimizer)
    set_grads(optimizer, 0, rank)
    if rank == 1:
        return None
    if rank == 0:
        await_waits([2])
        lose_patience(optimizer)
    else:
        note_wait(rank)
    return caught(optimizer, optimizer.step)


def test_a_wait_that_another_rank_ended_tells_the_time_that_passed() -> None:
    outcomes: list[Any] = run_workers(wait_in_vain, 3)
    for rank in (0, 2):
        raised = assert_raised(outcomes[rank], errors.StepTimeoutError, "rank 1 runs, but did not")
        told = re.search(r"did not complete within (\d+\.\d) s", raised.text)
        assert told is not None
        assert 1 <= float(told[1]) < 20
