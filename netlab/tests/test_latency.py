"""Labs whose frames take a while: what arrives, when, and that no process is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import NetlabError
from distlion_netlab import (
    Lab,
    LabPlan,
    forward,
    remove_abandoned_labs,
    remove_lab,
    run_command,
    switch,
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


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; init may still have to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


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
        (pid,) = switch.find_switch(plan)
    assert is_gone(pid)


def test_the_process_ends_where_the_lab_cannot_be_finished(monkeypatch: Any) -> None:
    started = []

    def refuse(self: Any, *_: Any) -> None:
        started.extend(switch.find_switch(self._plan))
        raise NetlabError("refused")

    monkeypatch.setattr("distlion_netlab.wires.Wires.set_rates", refuse)
    with pytest.raises(NetlabError, match="refused"):
        Lab(2, latency_s=LATENCY_S)
    (pid,) = started
    assert is_gone(pid)


def test_a_killed_owner_takes_the_process_with_it() -> None:
    code = f"""
        import os, signal
        from distlion_netlab import Lab, switch
        lab = Lab(2, latency_s={LATENCY_S})
        print(*switch.find_switch(lab.plan), flush=True)
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
        (pid,) = switch.find_switch(made.plan)
        assert not is_gone(pid)
        Lab.find("slow").close()
    finally:
        assert remove_lab("slow") == []
    assert is_gone(pid)


def test_a_lab_whose_process_was_killed_is_not_used() -> None:
    made = Lab(2, latency_s=LATENCY_S, name="broken", stays=True)
    made.close()
    try:
        switch.stop_switch(made.plan)
        with pytest.raises(NetlabError, match="forwards packets of lab 'broken' is gone"):
            Lab.find("broken")
    finally:
        remove_lab("broken")


def test_the_process_does_not_end_with_the_thread_that_made_the_lab() -> None:
    made: list[Lab] = []
    thread = threading.Thread(target=lambda: made.append(Lab(2, latency_s=LATENCY_S)))
    thread.start()
    thread.join()
    with made[0] as lab:
        (pid,) = switch.find_switch(lab.plan)
        assert not is_gone(pid)


class Port:
    """A port of a switch, with frames that arrive."""

    def __init__(self, number: int) -> None:
        self.number, self.arriving = number, list[bytes]()
        self.sent = list[bytes]()
        self.is_full = False

    def fileno(self) -> int:
        return self.number

    def recv(self, most: int) -> bytes:
        if not self.arriving:
            raise BlockingIOError
        return self.arriving.pop(0)

    def send(self, frame: bytes) -> None:
        if self.is_full:
            raise OSError
        self.sent.append(frame)


def frame(target: int, source: int, content: str = "") -> bytes:
    return bytes(10) + bytes([target] * 6) + bytes([source] * 6) + content.encode()


def test_frames_leave_after_the_latency_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(forward.time, "monotonic", lambda: now[0])
    ports: Any = [Port(number) for number in range(3)]
    made = forward.Switch(ports, 0.5)
    assert made.find_wait_s() == -1

    # Nobody knows yet where address 1 is: to all but the sender.
    ports[0].arriving = [frame(1, 0)]
    made.receive(0)
    now[0] = 100.25
    ports[1].arriving = [frame(0, 1, "a"), frame(0, 1, "b")]
    made.receive(1)
    made.send_due()
    assert made.find_wait_s() == 0.25
    assert [port.sent for port in ports] == [[], [], []]

    now[0] = 100.5
    made.send_due()
    assert [port.sent for port in ports] == [[], [frame(1, 0)], [frame(1, 0)]]

    now[0] = 100.75
    made.send_due()
    assert ports[0].sent == [frame(0, 1, "a"), frame(0, 1, "b")]
    assert made.find_wait_s() == -1


def test_a_frame_that_a_port_refuses_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward.time, "monotonic", lambda: 0.0)
    ports: Any = [Port(number) for number in range(3)]
    made = forward.Switch(ports, 0.0)
    ports[1].is_full = True
    ports[0].arriving = [frame(9, 0)]
    made.receive(0)
    made.send_due()

    assert [port.sent for port in ports] == [[], [], [frame(9, 0)]]


@pytest.mark.parametrize("latency_s", [-0.1, 1e-4, 11.0, float("nan"), float("inf")])
def test_a_latency_out_of_range_is_refused(latency_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected 0 for none, or 0\.001 to 10 s"):
        Lab(2, latency_s=latency_s)


def test_what_cannot_be_delayed_is_said() -> None:
    with Lab(2) as made, pytest.raises(NetlabError, match=r"cannot be delayed: .*No such device"):
        switch.start_switch(LabPlan(made.name, 3), LATENCY_S, stays=False)
