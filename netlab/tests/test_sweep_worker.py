"""What a worker of a sweep reads of its host."""

from pathlib import Path

import pytest

from distlion_netlab import sweep_worker


def test_retransmitted_segments_are_read_by_name_whatever_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "snmp"
    counters.write_text(
        "Ip: Forwarding RetransSegs\nIp: 1 99\n"
        "Tcp: RtoMin InSegs OutSegs RetransSegs InErrs\nTcp: 200 10 20 37 5\n"
    )
    monkeypatch.setattr(sweep_worker, "_COUNTERS", counters)

    assert sweep_worker._read_retransmitted() == 37


def test_the_hosts_own_counter_never_falls() -> None:
    before = sweep_worker._read_retransmitted()

    assert 0 <= before <= sweep_worker._read_retransmitted()


@pytest.mark.parametrize(
    ("n_hosts", "expected"),
    [(2, [{0, 2}, {1, 3}]), (4, [{0}, {1}, {2}, {3}]), (5, [{0, 1, 2, 3}] * 5)],
)
def test_hosts_have_cores_of_their_own_where_there_are_enough(
    n_hosts: int, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_worker.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    found = [sweep_worker.list_cores(rank, n_hosts) for rank in range(n_hosts)]
    assert found == expected
