"""Local workers of the lab on the hosts of an emulated network."""

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from distlion_lab.training.local_workers import run_workers
from distlion_lab.training.network import open_network

pytestmark = [
    pytest.mark.root,
    pytest.mark.distributed,
    pytest.mark.usefixtures("namespaces_work"),
]
N_BYTES = 1_000_000


def ignore(event):
    pass


def send_and_look(emit):
    """Broadcast from rank 0, and return its network interfaces and the seconds it took."""
    dist.barrier()
    started = time.perf_counter()
    dist.broadcast(torch.zeros(N_BYTES, dtype=torch.uint8), src=0)
    dist.barrier()
    seconds = time.perf_counter() - started
    return [name for _, name in socket.if_nameindex()], os.environ["GLOO_SOCKET_IFNAME"], seconds


def test_workers_talk_over_links_of_the_rate():
    with open_network(2, "1gbit") as network:
        network.set_rates("10mbit")
        names, interface, seconds = run_workers(
            send_and_look, world_size=2, observe=ignore, enter=network.enter
        )
    assert sorted(names) == ["eth0", "lo"]
    assert interface == "eth0"
    # 0.8 s at 10 Mbit/s; a burst may pass at once.
    assert seconds > 0.5
