"""What a worker of a sweep reads of its host."""

from pathlib import Path

import pytest

from distlion.netlab import sweep_worker


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
