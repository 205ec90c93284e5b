"""The hosts' TCP congestion control: what is set, what sockets use, and what the machine keeps."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import NetlabError
from distlion_netlab import Lab, SweepSettings, VectorWorkload, congestion, run_command, run_sweep
from distlion_netlab.congestion import read_congestion_control, set_congestion_control

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespaces_work")]

SETTINGS = Path("/proc/sys/net/ipv4")
AVAILABLE = (SETTINGS / "tcp_available_congestion_control").read_text().split()
ASK = (
    "from socket import IPPROTO_TCP, TCP_CONGESTION, socket\n"
    "print(socket().getsockopt(IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(bytes(1)).decode())"
)
needs_cubic = pytest.mark.skipif("cubic" not in AVAILABLE, reason="this kernel has no cubic")


def read_machine():
    return [(SETTINGS / f"tcp_{name}congestion_control").read_text() for name in ("", "allowed_")]


def ask_sockets(lab):
    lines = []
    command = [sys.executable, "-c", ASK]
    assert run_command(lab, command, show=lambda *line: lines.append(line[2].decode())) == 0
    return lines


# First: a lab that left the machine changed would hide that from later tests.
def test_the_machine_allows_an_algorithm_only_meanwhile(monkeypatch, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_text("reno bbr\n")
    monkeypatch.setattr(congestion, "_ALLOWED", allowed)

    def be_interrupted():
        with congestion._allowed("cubic"):
            assert allowed.read_text() == "reno bbr cubic"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert allowed.read_text() == "reno bbr\n"


@needs_cubic
def test_every_host_uses_cubic_whatever_the_machine_uses():
    with Lab(2) as lab:
        assert ask_sockets(lab) == ["cubic", "cubic"]
        assert lab.congestion_control == "cubic"


@pytest.mark.parametrize("name", AVAILABLE)
def test_each_algorithm_of_the_kernel_can_be_chosen_and_the_machine_keeps_its_own(name):
    before = read_machine()
    with Lab(2, congestion_control=name) as lab:
        assert ask_sockets(lab) == [name, name]
    assert read_machine() == before


def test_a_running_lab_is_changed(shared_lab):
    before = shared_lab.congestion_control
    shared_lab.set_congestion_control("reno")
    try:
        assert ask_sockets(shared_lab) == ["reno"] * 3
    finally:
        shared_lab.set_congestion_control(before)


@pytest.mark.parametrize("name", ["vagas", "", "reno cubic", "reno\ncubic", "reno" * 9])
def test_unknown_algorithm_is_an_error_that_lists_the_kernels(name, shared_lab):
    before = shared_lab.congestion_control
    with pytest.raises(InvalidArgumentError, match=f"offers: {', '.join(AVAILABLE)}"):
        shared_lab.set_congestion_control(name)
    assert shared_lab.congestion_control == before


def test_nothing_is_left_of_a_lab_whose_algorithm_is_unknown():
    before = read_machine()
    with pytest.raises(InvalidArgumentError, match="'vagas'"):
        Lab(1, name="test-vagas", congestion_control="vagas")
    Lab(1, name="test-vagas").close()
    assert read_machine() == before


def test_without_the_usual_one_hosts_use_reno_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(congestion, "USUAL", "vagas")
    with caplog.at_level(logging.WARNING, "distlion"), Lab(2) as lab:
        assert ask_sockets(lab) == ["reno", "reno"]
        assert lab.congestion_control == "reno"
    (warning,) = caplog.messages
    assert warning.startswith("hosts use reno, not vagas: ")
    assert "offers" in warning


def test_a_chosen_algorithm_is_never_replaced(monkeypatch, shared_lab, tmp_path):
    restricted = next(iter({*AVAILABLE} - {*read_machine()[1].split()}), None)
    if restricted is None:
        pytest.skip("this kernel restricts no algorithm")
    monkeypatch.setattr(congestion, "_ALLOWED", tmp_path / "missing" / "file")
    namespaces = shared_lab.plan.host_namespaces
    set_congestion_control(namespaces, "reno")
    try:
        with pytest.raises(NetlabError, match=f"control {restricted} cannot be set"):
            set_congestion_control(namespaces, restricted)
        assert read_congestion_control(namespaces[0]) == "reno"
    finally:
        monkeypatch.undo()
        set_congestion_control(namespaces, None)


def test_a_sweeps_record_names_what_its_hosts_used():
    settings = SweepSettings(
        hosts=2,
        rates=("unlimited",),
        methods=("all-reduce-fp32",),
        workload=VectorWorkload(1000),
        repetitions=2,
        block_s=0,
        congestion_control="reno",
    )
    record = run_sweep(settings, lambda progress: None)
    assert record["conditions"]["tcp_congestion_control"] == "reno"
    assert record["settings"]["congestion_control"] == "reno"


def test_a_lab_that_stays_keeps_its_own_until_a_run_changes_it():
    netlab = [sys.executable, "-m", "distlion", "netlab"]

    def call(*words):
        return subprocess.run(
            [*netlab, *words], capture_output=True, text=True, check=True
        ).stdout.split()

    call("up", "--hosts", "1", "--name", "test-stays-reno", "--congestion-control", "reno")
    try:
        run = ("run", "--name", "test-stays-reno")
        ask = ("--", sys.executable, "-c", ASK)
        assert call(*run, *ask) == ["[0]", "reno"]
        other = next(name for name in AVAILABLE if name != "reno")
        assert call(*run, "--congestion-control", other, *ask) == ["[0]", other]
    finally:
        call("down", "--name", "test-stays-reno")
