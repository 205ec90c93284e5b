"""No port is opened beside those of torch.distributed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from distlion.wire import groups, rendezvous
from distlion.wire.tcp import WIRE_VARIABLE

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


View = tuple[dict[str, str], int]


def listen_beside(rank: int, world_size: int, folder: str) -> list[View]:
    """Return who listens, and how many groups of Gloo there are, after each of: init, construction,
    a step, a checkpoint.
    """
    made = [torch.distributed.group.WORLD]

    class Counted(groups.ProcessGroupGloo):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            made.append(self)  # a group that ends closes its listener

    groups.ProcessGroupGloo = Counted
    views = [(list_listeners(), len(made))]
    model = torch.nn.Linear(70, 3)
    optimizer = distlion.DistributedLion(model.parameters(), lr=1e-3)
    views.append((list_listeners(), len(made)))
    model(torch.full((2, 70), float(rank + 1))).sum().backward()
    optimizer.step()
    optimizer.verify_replicas()
    views.append((list_listeners(), len(made)))
    distlion.save_checkpoint(folder, model, optimizer).wait()
    views.append((list_listeners(), len(made)))
    return views


# The group of all; the optimizer's own, for votes and for questions; its checkpoints'. Own sockets
# in their place listen only while they connect.
LISTENERS = {"gloo": [1, 3, 3, 4], "tcp": [1, 1, 1, 1]}


@pytest.fixture(scope="module", params=LISTENERS)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def views_of_ranks(wire: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[View]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    # New processes: torch's groups of an earlier job may keep their sockets.
    return run_workers(listen_beside, 2, folder, environment={WIRE_VARIABLE: wire})


def test_every_listener_is_that_of_a_group_of_gloo(views_of_ranks, wire):
    for views in views_of_ranks:
        assert [groups for _, groups in views] == LISTENERS[wire]
        assert [len(listeners) for listeners, _ in views] == LISTENERS[wire]


def test_steps_open_no_listener(views_of_ranks):
    for views in views_of_ranks:
        assert views[1] == views[2]


def test_listeners_of_gloo_are_on_the_chosen_interface_alone(views_of_ranks):
    for views in views_of_ranks:
        assert set(views[-1][0].values()) <= _LOOPBACK


def listen_without_interface(rank: int, world_size: int) -> list[set[str]]:
    """Return where a worker listens while it makes an optimizer, and behind it."""
    del os.environ["GLOO_SOCKET_IFNAME"]
    before = set(list_listeners())
    seen: list[set[str]] = []
    listen = rendezvous.listen

    def look(*args: Any, **options: Any) -> list[socket.socket]:
        made = listen(*args, **options)
        seen.append({where for inode, where in list_listeners().items() if inode not in before})
        return made

    rendezvous.listen = look
    optimizer = distlion.DistributedLion([torch.nn.Parameter(torch.ones(9))], lr=1e-3)
    seen.append({where for inode, where in list_listeners().items() if inode not in before})
    optimizer.verify_replicas()
    return seen


def test_own_sockets_listen_while_they_connect_and_not_on_all_interfaces():
    environment = {WIRE_VARIABLE: "tcp"}
    for *making, after in run_workers(listen_without_interface, 2, environment=environment):
        assert len(making) == 2
        assert all(making)
        assert not set().union(*making) & {"00000000", "0" * 32}
        assert not after


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
    # docs/explanation/guarantees.md says so; where torch changes it, the page must.
    (addresses,) = run_workers(listen_as_store, 1, process_group=False)
    assert addresses
    assert addresses <= {"00000000", "0" * 32}
