"""Labs whose frames take a while: what arrives, when, and that no process is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from distlion.errors import InvalidArgumentError, NetlabError
from distlion.lab.netlab import (
    Lab,
    LabPlan,
    remove_abandoned_labs,
    remove_lab,
    run_command,
    switch,
    wires,
)

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespaces_work")]

LATENCY_S = 0.02


@pytest.fixture(scope="module")
def lab(namespaces_work: None) -> Iterator[Lab]:
    with Lab(3, latency_s=LATENCY_S) as found:
        yield found


def run(lab: Lab, code: str) -> list[str]:
    """Run a program on every host, and return what they wrote."""
    lines: list[str] = []
    command = [sys.executable, "-c", textwrap.dedent(code)]
    status = run_command(lab, command, show=lambda rank, err, line: lines.append(line.decode()))
    assert status == 0, lines
    return lines


def switches_of(plan: Any) -> list[int]:
    return wires.list_processes(plan, of_bridge=True)


CONNECT = """
    import os, socket, time

    def connect():
        while True:
            began = time.monotonic()
            try:
                peer = socket.create_connection(("10.77.0.1", 5000))
                return peer, time.monotonic() - began
            except ConnectionRefusedError:
                pass
"""


def test_a_connection_takes_one_way_there_and_one_way_back(lab: Lab) -> None:
    code = f"""
        {textwrap.indent(textwrap.dedent(CONNECT), " " * 8).strip()}
        if os.environ["RANK"] == "0":
            server = socket.create_server(("10.77.0.1", 5000))
            peers = [server.accept()[0] for _ in range(2)]
            for peer in peers:
                peer.recv(1)
        else:
            peer, seconds = connect()
            peer.send(b"x")
            print(seconds)
    """
    found = list(map(float, run(lab, code)))

    assert len(found) == 2
    assert min(found) >= 2 * LATENCY_S


def test_all_bytes_arrive_at_limited_rates_too(lab: Lab) -> None:
    # More than a port's queue holds, from two hosts to one.
    code = f"""
        {textwrap.indent(textwrap.dedent(CONNECT), " " * 8).strip()}
        import hashlib
        data = b"".join(number.to_bytes(4, "big") for number in range(500_000))
        if os.environ["RANK"] == "0":
            server = socket.create_server(("10.77.0.1", 5000))
            for _ in range(2):
                with server.accept()[0].makefile("rb") as file:
                    print(file.read() == data)
        else:
            peer, _ = connect()
            peer.sendall(data)
    """
    lab.set_rates("200mbit")
    before = lab.read_counters()
    found = run(lab, code)
    grown = [now - then for now, then in zip(lab.read_counters(), before, strict=True)]
    lab.set_rates("unlimited")

    assert found == ["True", "True"]
    assert grown[0].rx_bytes > 4_000_000
    assert min(grown[1].tx_bytes, grown[2].tx_bytes) > 2_000_000


def test_a_frame_goes_to_the_host_that_it_is_for(lab: Lab) -> None:
    code = f"""
        {textwrap.indent(textwrap.dedent(CONNECT), " " * 8).strip()}
        if os.environ["RANK"] == "0":
            server = socket.create_server(("10.77.0.1", 5000))
            with server.accept()[0].makefile("rb") as file:
                print(len(file.read()))
        elif os.environ["RANK"] == "1":
            peer, _ = connect()
            peer.sendall(bytes(1_000_000))
    """
    before = lab.read_counters()
    assert run(lab, code) == ["1000000"]

    other = lab.read_counters()[2] - before[2]
    assert other.rx_bytes < 10_000


def test_a_cable_that_was_pulled_works_again(lab: Lab) -> None:
    lab.set_link(1, up=False)
    lab.set_link(1, up=True)
    test_a_connection_takes_one_way_there_and_one_way_back(lab)


def test_the_process_ends_with_the_lab() -> None:
    with Lab(2, latency_s=LATENCY_S) as made:
        plan = made.plan
        (pid,) = switches_of(plan)
    assert not os.path.exists(f"/proc/{pid}")


def test_the_process_ends_where_the_lab_cannot_be_finished(monkeypatch: Any) -> None:
    started = []

    def refuse(self: Any, *_: Any) -> None:
        started.extend(switches_of(self._plan))
        raise NetlabError("refused")

    monkeypatch.setattr("distlion.lab.netlab.wires.Wires.set_rates", refuse)
    with pytest.raises(NetlabError, match="refused"):
        Lab(2, latency_s=LATENCY_S)
    (pid,) = started
    assert not os.path.exists(f"/proc/{pid}")


def test_a_killed_owner_takes_the_process_with_it() -> None:
    code = f"""
        import os, signal
        from distlion.lab.netlab import Lab, wires
        lab = Lab(2, latency_s={LATENCY_S})
        print(*wires.list_processes(lab.plan, of_bridge=True), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    owner = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    pid = int(owner.stdout)
    with contextlib.suppress(ProcessLookupError):
        # The kernel ends it with its parent; it takes a moment to close its ports.
        descriptor = os.pidfd_open(pid)
        ended, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ended
    remove_abandoned_labs()


def test_a_lab_that_stays_keeps_its_process_until_it_is_removed() -> None:
    made = Lab(2, latency_s=LATENCY_S, name="slow", stays=True)
    made.close()
    try:
        (pid,) = switches_of(made.plan)
    finally:
        assert remove_lab("slow") == []
    assert not switches_of(made.plan)
    assert pid


@pytest.mark.parametrize("latency_s", [-0.1, 1e-4, 11.0, float("nan"), float("inf")])
def test_a_latency_out_of_range_is_refused(latency_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected 0 for none, or 0\.001 to 10 s"):
        Lab(2, latency_s=latency_s)


def test_what_cannot_be_delayed_is_said() -> None:
    with Lab(2) as made, pytest.raises(NetlabError, match=r"cannot be delayed: .*No such device"):
        switch.start_switch(LabPlan(made.name, 3), LATENCY_S, stays=False)
