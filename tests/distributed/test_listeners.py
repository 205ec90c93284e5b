"""No port is opened beside those of torch.distributed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

import distlion
from cluster import run_workers

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc/net"),
]

_LISTEN = "0A"
_LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def list_listeners() -> dict[str, str]:
    """Return the sockets of this process on which it listens: inode -> address in hexadecimal."""
    found = {}
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:  # that of the folder itself
            continue
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTEN and f"socket:[{rest[5]}]" in own:
                found[rest[5]] = local.partition(":")[0]
    return found


def listen_beside(rank: int, world_size: int, folder: str) -> list[dict[str, str]]:
    """Return who listens before an optimizer is made, and after all that it does."""
    views = [list_listeners()]
    model = torch.nn.Linear(70, 3)
    optimizer = distlion.DistributedLion(model.parameters(), lr=1e-3)
    views.append(list_listeners())
    model(torch.full((2, 70), float(rank + 1))).sum().backward()
    optimizer.step()
    optimizer.verify_replicas()
    views.append(list_listeners())
    distlion.save_checkpoint(folder, model, optimizer).wait()
    views.append(list_listeners())
    assert len(views[-1]) == len(torch.distributed.distributed_c10d._world.pg_map)
    return views


def test_optimizer_and_its_steps_open_no_listener(tmp_path):
    for before, made, stepped, _ in run_workers(listen_beside, 2, str(tmp_path)):
        assert before  # Gloo's own
        assert before == made == stepped


def test_checkpoint_opens_the_one_of_a_process_group_of_torch(tmp_path):
    # In the workers, the listeners are as many as torch's process groups.
    for *_, before, after in run_workers(listen_beside, 2, str(tmp_path)):
        assert len(after) == len(before) + 1


def test_listeners_of_gloo_are_on_the_chosen_interface_alone(tmp_path):
    for views in run_workers(listen_beside, 2, str(tmp_path)):
        assert set(views[-1].values()) <= _LOOPBACK


def listen_oneself(rank: int, world_size: int) -> list[dict[str, str]]:
    before = list_listeners()
    with socket.create_server(("127.0.0.1", 0)):
        return [before, list_listeners()]


def test_a_listener_is_seen():
    ((before, after),) = run_workers(listen_oneself, 1)
    assert len(after) == len(before) + 1


def listen_as_store(rank: int, world_size: int) -> set[str]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = set(list_listeners().values())
    del store
    return found


def test_store_of_torch_listens_everywhere_whatever_its_address():
    # docs/security.md says so; where torch changes it, the page must.
    (addresses,) = run_workers(listen_as_store, 1, process_group=False)
    assert addresses
    assert addresses <= {"00000000", "0" * 32}
