"""Labs as the kernel has them: what is made, what is limited, and that nothing is left."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import process

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import NetlabError
from distlion_netlab import (
    Lab,
    LabPlan,
    TokenBucket,
    list_states,
    remove_abandoned_labs,
    remove_lab,
    run_command,
    wires,
)
from distlion_netlab.wires import read_offloads
from signals import hear_ctrl_c
from tiers import in_tiers

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespaces_work")]


def left_of(name):
    """What the machine still has of a lab: namespaces, state, interfaces in the root namespace."""
    namespaces = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    found = [entry for entry in namespaces if entry.startswith(f"distlion-{name}-")]
    return found + [state.name for state in list_states() if state.name == name]


def run_on_host(lab, host, command):
    """Run a shell command on one host and return what it wrote."""
    lines = []
    script = f'test "$RANK" != {host} || {{ {command}; }}'
    status = run_command(
        lab, ["sh", "-c", script], show=lambda rank, is_error, line: lines.append(line.decode())
    )
    assert status == 0, lines
    return lines


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def start_owner(then):
    """Start a process that makes a lab, writes its name, and goes on with ``then``."""
    code = f"""
        import os, signal, sys
        from distlion_netlab import Lab
        with Lab(2) as lab:
            print(lab.name, flush=True)
            {then}
    """
    owner = subprocess.Popen(
        python(code),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509
    )
    return owner, owner.stdout.readline().strip()


def test_a_host_has_loopback_and_one_interface(shared_lab):
    lines = run_on_host(shared_lab, 1, "ip -brief address")
    assert [line.split()[0].partition("@")[0] for line in lines] == ["lo", "eth0"]
    assert "10.77.0.2/24" in lines[1]


def test_hosts_reach_each_other(shared_lab):
    code = f"""
        import os, socket
        rank = int(os.environ["RANK"])
        if rank == 0:
            server = socket.create_server(("10.77.0.1", 5000))
            print(sorted(server.accept()[1][0] for _ in range(2)))
        else:
            for _ in range({10**6}):
                try:
                    socket.create_connection(("10.77.0.1", 5000))
                    break
                except ConnectionRefusedError:
                    pass
    """
    lines = []
    assert run_command(shared_lab, python(code), show=lambda *line: lines.append(line)) == 0
    assert lines == [(0, False, b"['10.77.0.2', '10.77.0.3']")]


def test_nothing_appears_among_the_interfaces_of_the_machine(namespaces_work):
    before = socket.if_nameindex()
    with Lab(2):
        assert socket.if_nameindex() == before


def test_segmentation_offload_is_off_at_both_ends(shared_lab):
    plan = shared_lab.plan
    assert read_offloads(plan.bridge_namespace, [plan.port(host) for host in range(3)]) == []
    assert [read_offloads(name, ["eth0"]) for name in plan.host_namespaces] == [[], [], []]


def test_rates_are_what_the_kernel_enforces_up_and_down():
    with Lab(3, "100mbit,1gbit/200mbit,unlimited") as lab:
        found = lab.read_buckets()
    rates = [[bucket and bucket.bytes_per_s for bucket in host] for host in found]
    assert rates == [[12_500_000] * 2, [125_000_000, 25_000_000], [None, None]]


@pytest.mark.parametrize("rate", ["800kbit", "100mbit", "1gbit", "10gbit", "25gbit"])
def test_bucket_read_back_is_the_one_that_was_chosen(rate, shared_lab):
    shared_lab.set_rates(rate)
    (up, down), *_ = shared_lab.read_buckets()
    shared_lab.set_rates("unlimited")
    assert up == down
    chosen = TokenBucket.for_rate(8 * up.bytes_per_s)
    # The kernel keeps a burst as the microseconds that it takes.
    assert up.burst_bytes == pytest.approx(chosen.burst_bytes, abs=up.bytes_per_s / 1e6 + 1)
    assert up.queue_bytes == chosen.queue_bytes


def test_rates_change_while_the_lab_runs(shared_lab):
    seen = []
    for rate in ("100mbit", "1gbit", "unlimited"):
        shared_lab.set_rates(rate)
        seen.append(shared_lab.read_buckets()[2][0])
    assert [bucket and bucket.bytes_per_s for bucket in seen] == [12_500_000, 125_000_000, None]


def test_counters_grow_by_the_bytes_sent_and_their_headers(shared_lab, tmp_path):
    n_bytes = 3_000_000
    # Opening it waits for the other end, so that no refused attempt is counted.
    listening = tmp_path / "listening"
    os.mkfifo(listening)
    sent_again = tmp_path / "sent again"
    code = f"""
        import os, socket
        rank = int(os.environ["RANK"])

        def count_sent_again():
            lines = open("/proc/self/net/snmp").read().splitlines()
            names, values = [line.split() for line in lines if line.startswith("Tcp:")]
            return int(values[names.index("RetransSegs")])

        if rank == 0:
            server = socket.create_server(("10.77.0.1", 5001))
            open({str(listening)!r}, "w").close()
            peer, _ = server.accept()
            left = {n_bytes}
            while left:
                left -= len(peer.recv(left))
        elif rank == 1:
            open({str(listening)!r}).close()
            again = count_sent_again()
            peer = socket.create_connection(("10.77.0.1", 5001))
            peer.sendall(bytes({n_bytes}))
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)
            open({str(sent_again)!r}, "w").write(str(count_sent_again() - again))
    """
    before = shared_lab.read_counters()
    assert run_command(shared_lab, python(code)) == 0
    grown = [b - a for a, b in zip(before, shared_lab.read_counters(), strict=True)]
    # 66 bytes of headers for every 1448 of payload; the rest is for short segments.
    # On a busy machine TCP takes segments for lost, and sends them again.
    expected = n_bytes * (1 + 66 / 1448) + 1514 * int(sent_again.read_text())
    assert grown[1].tx_bytes == pytest.approx(expected, rel=0.01)
    assert grown[0].rx_bytes == pytest.approx(expected, rel=0.01)
    # Packets are those of the line: none is larger than a frame.
    assert grown[1].tx_packets >= n_bytes / 1448
    assert grown[2].tx_bytes < 10_000


def test_a_host_whose_cable_is_pulled_is_cut_off_until_it_is_plugged_again(shared_lab):
    shared_lab.set_link(1, up=False)
    (cut,) = run_on_host(
        shared_lab, 1, "cat /sys/class/net/eth0/carrier; ip link show eth0 | head -1"
    )[-1:]
    shared_lab.set_link(1, up=True)
    (joined,) = run_on_host(shared_lab, 1, "ip link show eth0 | head -1")
    assert "NO-CARRIER" in cut
    assert "NO-CARRIER" not in joined


def test_link_of_a_host_that_is_not_there_is_an_error(shared_lab):
    with pytest.raises(InvalidArgumentError, match="host 3: expected 0 to 2"):
        shared_lab.set_link(3, up=False)


def test_nothing_is_left_after_the_block():
    with Lab(2) as lab:
        assert len(left_of(lab.name)) == 4
    assert left_of(lab.name) == []


def test_nothing_is_left_after_an_exception():
    class Mishap(Exception):
        pass

    with pytest.raises(Mishap), Lab(2) as lab:
        raise Mishap
    assert left_of(lab.name) == []


def test_nothing_is_left_when_a_lab_without_block_is_forgotten():
    lab = Lab(2)
    name = lab.name
    del lab
    assert left_of(name) == []


def test_nothing_is_left_when_the_lab_cannot_be_finished(monkeypatch):
    def refuse(*_):
        raise NetlabError("refused")

    monkeypatch.setattr("distlion_netlab.wires.Wires.set_rates", refuse)
    with pytest.raises(NetlabError, match="refused"):
        Lab(2, name="unfinished")
    assert left_of("unfinished") == []


@pytest.mark.parametrize(
    "number", in_tiers([signal.SIGTERM, signal.SIGINT], lambda n: n == signal.SIGINT)
)
def test_nothing_is_left_after_a_signal(number):
    owner, name = start_owner("sys.stdin.read()")
    assert left_of(name)
    owner.send_signal(number)
    assert owner.wait() != 0
    assert left_of(name) == []


@pytest.mark.slow
def test_nothing_is_left_after_an_end_without_leaving_the_block():
    owner, name = start_owner("sys.exit(3)")
    assert owner.wait() == 3
    assert left_of(name) == []


def test_what_a_killed_owner_leaves_goes_with_the_next_lab():
    owner, name = start_owner("os.kill(os.getpid(), signal.SIGKILL)")
    owner.wait()
    assert left_of(name)
    remove_abandoned_labs()
    assert left_of(name) == []


def test_a_forked_child_that_ends_does_not_take_the_lab_with_it():
    with Lab(2) as lab:
        child = os.fork()
        if child == 0:
            lab.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert left_of(lab.name)


def test_a_lab_that_stays_can_be_found_and_removed():
    Lab(2, "100mbit", name="test-stays", stays=True).close()
    try:
        with Lab.find("test-stays") as found:
            assert found.read_buckets()[0][0].bytes_per_s == 12_500_000
        assert left_of("test-stays")
    finally:
        assert remove_lab("test-stays") == []
    assert left_of("test-stays") == []


def test_processes_that_run_in_a_removed_lab_are_reported():
    Lab(1, name="test-busy", stays=True).close()
    with subprocess.Popen(
        ["ip", "netns", "exec", "distlion-test-busy-h0", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdin.write(b"running\n")
        process.stdin.flush()
        process.stdout.readline()
        running = remove_lab("test-busy")
        process.stdin.close()
    assert running == [process.pid]


def test_a_name_cannot_be_used_twice():
    with Lab(1, name="test-twice"):
        with pytest.raises(NetlabError, match=r"there is a lab .* netlab down --name test-twice"):
            Lab(1, name="test-twice")
        assert left_of("test-twice")


def test_an_abandoned_lab_may_be_removed_by_several_at_once(monkeypatch):
    plan = LabPlan("test-gone", 2)
    monkeypatch.setattr(wires.netns, "listnetns", lambda: list(plan.namespaces))
    wires.remove_namespaces(plan)  # another process was faster


def test_a_namespace_of_somebody_else_is_left_alone():
    subprocess.run(["ip", "netns", "add", "distlion-test-clash-h0"], check=True)
    try:
        with pytest.raises(NetlabError, match="exist already: distlion-test-clash-h0"):
            Lab(1, name="test-clash")
        assert left_of("test-clash") == ["distlion-test-clash-h0"]
    finally:
        subprocess.run(["ip", "netns", "delete", "distlion-test-clash-h0"], check=True)


def test_wrong_rate_is_reported_before_anything_is_made():
    with pytest.raises(InvalidArgumentError, match="rate"):
        Lab(2, "fast", name="test-rate")
    assert left_of("test-rate") == []


def test_other_users_than_root_are_reported(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetlabError, match="needs root rights"):
        Lab(2)


def test_other_systems_than_linux_are_reported(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NetlabError, match="needs Linux; this is darwin"):
        Lab(2)


def test_no_child_of_a_lab_runs_the_callers_handler_and_clean_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = process.wrapper

    def answer_and_wait(*args: Any) -> None:
        run(*args)
        signal.pause()  # until SIGTERM, which otherwise may come before the child's end or not

    left = tmp_path / "left"

    @contextmanager
    def cleaning_up() -> Iterator[None]:
        try:
            yield
        finally:
            with left.open("a") as file:
                file.write(f"{os.getpid()}\n")

    monkeypatch.setattr(process, "wrapper", answer_and_wait)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with cleaning_up(), Lab(2):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.read_text().split() == [str(os.getpid())]
