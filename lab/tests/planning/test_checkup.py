import socket
from dataclasses import replace
from pathlib import Path

import pytest

from distlion.errors import ProcessGroupError
from distlion.wire import LinkModel
from distlion_lab.planning import checkup
from distlion_lab.planning.bench import KernelRates
from distlion_lab.planning.checkup import Checkup, examine, find_faults, report_worker
from distlion_lab.planning.link_probe import LinkProbe
from distlion_lab.planning.machine import CPU
from distlion_lab.planning.worker_report import WorkerReport

HEALTHY = WorkerReport(
    host="a",
    cpu="some processor",
    cores=8,
    affinity="ff",
    threads=1,
    interface="eth0",
    loopback=False,
    congestion_control="cubic",
    slow_after_pause=True,
    denormals=True,
    debug=False,
    kernels=KernelRates("avx2", CPU.encode_bytes_per_s, CPU),
)
LINK = LinkModel(1e-4, 1e9)


def probe_of(*rates):
    return LinkProbe(LINK, tuple(LinkModel(1e-4, rate) for rate in rates))


def faults_of(*workers, rates=None):
    return find_faults(workers, probe_of(*(rates or [1e9] * len(workers))))


def test_healthy_workers_have_no_faults():
    assert faults_of(HEALTHY, replace(HEALTHY, host="b")) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": KernelRates("reference", 1.0, CPU)}, "DISTLION_KERNELS"),
        ({"kernels": KernelRates("avx2", 1e12, CPU)}, "of a plain read"),
        ({"kernels": KernelRates("avx2", 1e12, CPU, core_share=0.5)}, "machine is busy"),
        ({"debug": True}, "debug build"),
        ({"denormals": False}, "denormals"),
        ({"threads": 9}, "9 threads on 8 cores"),
    ],
    ids=["reference kernels", "slow core", "busy machine", "debug torch", "denormals", "threads"],
)
def test_fault_of_a_worker_is_reported(changes, words):
    (fault,) = faults_of(replace(HEALTHY, **changes))
    assert words in fault


@pytest.mark.parametrize("core_share", [1.0, 0.3])
def test_slow_kernels_are_never_taken_for_a_debug_build(core_share):
    slow = KernelRates("avx2", 1e12, CPU, core_share=core_share)
    (fault,) = faults_of(replace(HEALTHY, kernels=slow))
    assert "debug" not in fault


def test_threads_of_all_workers_of_a_host_count_together():
    crowded = replace(HEALTHY, threads=5)
    (fault,) = faults_of(crowded, crowded)
    assert "10 threads on 8 cores" in fault
    assert faults_of(crowded, replace(crowded, host="b")) == ()


def bound(mask, threads):
    return replace(HEALTHY, affinity=mask, cores=int(mask, 16).bit_count(), threads=threads)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([("f", 4), ("f0", 4)], None),
        ([("f", 4), ("f0", 3), ("f0", 3)], "6 threads on 4 cores"),
        ([("1", 1), ("1", 1), ("fe", 1)], "2 threads on 1 cores"),
        ([("f", 4), ("ff", 5)], "9 threads on 8 cores"),
        ([("f", 5), ("f0", 6)], "6 threads on 4 cores"),
    ],
    ids=["apart", "two share half", "two share one", "one is free", "both are crowded"],
)
def test_threads_count_together_where_they_are_bound_to_the_same_cores(workers, words):
    found = tuple(bound(*worker) for worker in workers)
    checkup = Checkup(found, probe_of(*[1e9] * len(found)), ())
    faults = [fault for fault in faults_of(*found) if "threads" in fault]
    if words is None:
        assert faults == []
        assert checkup.machine == CPU
    else:
        (fault,) = faults
        assert words in fault
        threads, cores = int(words.split()[0]), int(words.split()[3])
        slowed = CPU.write_frame_s * threads / cores
        assert checkup.machine.write_frame_s == pytest.approx(slowed)


@pytest.mark.parametrize("changes", [{"interface": "lo"}, {"interface": "", "loopback": True}])
def test_loopback_is_a_fault_between_hosts_only(changes):
    worker = replace(HEALTHY, **changes)
    assert faults_of(worker) == ()
    (fault,) = faults_of(worker, replace(HEALTHY, host="b"))
    assert "rank 0" in fault and "GLOO_SOCKET_IFNAME" in fault


def test_rank_with_the_slowest_link_is_named():
    (fault,) = faults_of(HEALTHY, HEALTHY, replace(HEALTHY, host="c"), rates=[1e9, 1e9, 1e8])
    assert "rank 2 (c)" in fault and "10.0 times slower" in fault


def test_two_ranks_are_not_blamed_for_their_link():
    assert faults_of(HEALTHY, HEALTHY, rates=[1e9, 1e8]) == ()


def test_rank_with_the_slowest_kernels_is_named():
    slow = replace(CPU, commit_bytes_per_s=CPU.commit_bytes_per_s / 4)
    workers = (HEALTHY, replace(HEALTHY, kernels=replace(HEALTHY.kernels, machine=slow)), HEALTHY)
    (fault,) = faults_of(*workers)
    assert "rank 1" in fault and "4.0 times slower" in fault
    checkup = Checkup(workers, probe_of(1e9, 1e9, 1e9), ())
    assert (checkup.slowest_kernels, checkup.kernels_slowdown) == (1, 4.0)


def test_shared_cores_slow_the_arithmetic_down():
    crowded = Checkup((replace(HEALTHY, threads=12),) * 2, probe_of(1e9, 1e9), ())
    assert crowded.machine.encode_s(1e6, 1) == pytest.approx(3 * CPU.encode_s(1e6, 1))
    assert crowded.machine.write_frame_s == pytest.approx(3 * CPU.write_frame_s)
    spacious = Checkup((HEALTHY, HEALTHY), probe_of(1e9, 1e9), ())
    assert spacious.machine == CPU


def test_congestion_control_is_that_of_new_sockets():
    if not hasattr(socket, "TCP_CONGESTION"):
        pytest.skip("this system has no TCP_CONGESTION")
    with socket.socket() as made:
        used = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert report_worker(HEALTHY.kernels).congestion_control == used.rstrip(b"\0").decode()


FAR = LinkModel(0.1, 1e8)


@pytest.mark.parametrize(
    ("link", "changes", "hosts"),
    [
        (FAR, {}, "a, b: a round takes 100 ms"),
        (FAR, {"slow_after_pause": False}, "b: a round takes 100 ms"),
        (FAR, {"congestion_control": "bbr"}, "b: a round takes 100 ms"),
        (LINK, {}, None),
    ],
    ids=["both", "one is set", "one has bbr", "near"],
)
def test_far_hosts_hear_that_tcp_begins_slowly_after_each_pause(link, changes, hosts):
    workers = replace(HEALTHY, **changes), replace(HEALTHY, host="b")
    faults = find_faults(workers, LinkProbe(link, (link, link)))
    if hosts is None:
        assert faults == ()
    else:
        (fault,) = faults
        assert fault.startswith(hosts)
        assert "tcp_slow_start_after_idle=0" in fault


def test_what_tcp_does_after_a_pause_is_read():
    setting = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    if not setting.exists():
        pytest.skip("this system does not tell")
    expected = setting.read_text().strip() == "1"
    assert report_worker(HEALTHY.kernels).slow_after_pause == expected


def test_examination_without_process_group_is_an_error():
    with pytest.raises(ProcessGroupError, match="init_process_group"):
        examine(print)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000\n", 8), ("150000 100000\n", 2), ("10000 100000\n", 1), ("1600000 100000", 8)],
)
def test_cores_are_those_that_the_control_group_allows(limit, cores, monkeypatch, tmp_path):
    monkeypatch.setattr(checkup.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(checkup, "_CPU_LIMIT", tmp_path / "cpu.max")
    assert checkup.count_cores() == 8
    (tmp_path / "cpu.max").write_text(limit)
    assert checkup.count_cores() == cores


def test_cores_of_a_worker_are_those_to_which_it_is_bound(monkeypatch):
    monkeypatch.setattr(checkup.os, "sched_getaffinity", lambda pid: {1, 70}, raising=False)
    assert int(report_worker(HEALTHY.kernels).affinity, 16) == 1 << 70 | 1 << 1


def test_a_host_of_a_name_that_no_service_takes_is_not_a_loopback():
    assert not checkup._resolves_to_loopback("n" * 64)
