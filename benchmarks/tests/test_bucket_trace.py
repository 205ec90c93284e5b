"""The trace of a bucket on all ranks: its parts from made-up instants, packets, and a short run."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from programs import imported_by_name

FIRST = [0, 10, 12, 13, 25, 28, 30, 35, 36, 37, 50, 51, 53, 60, 61]
LATE = [1, 18, 20, 21, 22, 24, 26, 31, 33, 34, 45, 49, 52, 59, 62]
STEP = [FIRST, LATE]


@pytest.fixture(scope="module")
def trace() -> Iterator[Any]:
    pytest.importorskip("pyroute2")
    pytest.importorskip("matplotlib")
    modules = ("packets", "bucket_parts", "tracing", "bucket_pages")
    with imported_by_name("bucket_trace", *modules) as found:
        yield found


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_fill_a_step_without_gap_or_overlap(trace: Any, rank: int) -> None:
    spans = list(trace.bucket_parts.list_spans(STEP, rank))
    assert all(before.end == after.begin for before, after in pairwise(spans))
    assert (spans[0].begin, spans[-1].end) == (STEP[rank][0], STEP[rank][-1])
    assert {span.part for span in spans} == set(trace.bucket_parts.PARTS)


def find_wait(trace: Any, step: list[list[int]], rank: int) -> list[tuple[int, int]]:
    """Return the begin and the end of each of the three parts of the wait for votes."""
    parts = trace.bucket_parts
    spans = [
        (span.begin, span.end)
        for span in parts.list_spans(step, rank)
        if span.part in (parts.LATER, parts.ON_THE_WAY, parts.WAKE_UP)
    ]
    return spans[:3]


def test_a_wait_is_cut_where_all_have_sent_and_where_the_last_byte_came(trace: Any) -> None:
    assert find_wait(trace, STEP, 0) == [(13, 21), (21, 25), (25, 28)]


def test_the_last_rank_waits_for_nobody(trace: Any) -> None:
    assert find_wait(trace, STEP, 1) == [(21, 21), (21, 22), (22, 24)]


def test_bytes_that_came_before_the_wait_take_none_of_it(trace: Any) -> None:
    early = [[*LATE[:4], 17, *LATE[5:]], FIRST]
    assert find_wait(trace, early, 0) == [(21, 21), (21, 21), (21, 24)]


def test_means_are_over_ranks_and_medians_over_steps(trace: Any) -> None:
    parts = trace.bucket_parts
    longer = [[*FIRST[:-1], 71], LATE]
    # The rest of step(): 1 and 3, twice; 11 and 3.
    assert parts.find_medians([STEP, longer, STEP])[parts.REST] == 2
    assert parts.sum_parts(longer)[parts.REST] == 7
    assert parts.find_median_step([longer, STEP, STEP]) is STEP


def make_packet(trace: Any, at_ns: int, sequence: int, n_bytes: int, **changes: Any) -> Any:
    packet = trace.packets.Packet(at_ns, "10.0.0.2", (4000, 5000), sequence, n_bytes)
    return packet._replace(**changes)


def test_a_first_packet_that_was_lost_counts_where_it_comes_again(trace: Any) -> None:
    start = 2**32 - 50
    flow = [make_packet(trace, 1, 50, 100), make_packet(trace, 2, start, 100)]
    assert trace.packets.find_arrival(flow, 100) == 2
    assert trace.packets.find_arrival(flow, 200) == 2


def test_a_chunk_is_there_when_its_last_gap_is_filled(trace: Any) -> None:
    start = 2**32 - 50
    flow = [
        make_packet(trace, 1, start, 100),
        make_packet(trace, 2, 150, 100),
        make_packet(trace, 3, start, 100),  # sent once more
        make_packet(trace, 4, 50, 100),
        make_packet(trace, 5, 250, 100),
    ]
    found = [trace.packets.find_arrival(flow, n_bytes) for n_bytes in (100, 101, 300, 301)]
    assert found == [1, 4, 4, 5]


def test_bytes_that_did_not_come_are_not_guessed(trace: Any) -> None:
    with pytest.raises(ValueError, match=r"100 bytes of a peer came; expected 101"):
        trace.packets.find_arrival([make_packet(trace, 1, 7, 100)], 101)


def test_the_last_peer_counts_and_only_its_busiest_connection(trace: Any) -> None:
    packets = [
        make_packet(trace, 1, 0, 500),
        make_packet(trace, 2, 0, 20, ports=(29500, 5001)),
        make_packet(trace, 3, 0, 400, source="10.0.0.3"),
        make_packet(trace, 4, 400, 200, source="10.0.0.3"),
        make_packet(trace, 5, 500, 100),
        make_packet(trace, 6, 20, 20, ports=(29500, 5001)),
    ]
    assert trace.packets.find_arrivals(packets, [400, 500, 600]) == [3, 4, 5]


def make_frame(*, protocol: int, data: bytes) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", 4000, 5000, 77, 0, 8 << 4, 0, 0, 0, 0) + bytes(12) + data
    address = socket.inet_aton("10.0.0.2")
    ip = struct.pack("!BBHHHBBH", 0x46, 0, 24 + len(tcp), 0, 0, 64, protocol, 0)
    return bytes(12) + b"\x08\x00" + ip + address + address + bytes(4) + tcp


def test_heads_with_options_are_read(trace: Any) -> None:
    frame = make_frame(protocol=6, data=bytes(1000))
    assert trace.packets.read_packet(frame[:256], 9) == make_packet(trace, 9, 77, 1000)


@pytest.mark.parametrize(("protocol", "data"), [(17, bytes(100)), (6, b"")], ids=["UDP", "no data"])
def test_other_packets_are_left_out(trace: Any, protocol: int, data: bytes) -> None:
    assert trace.packets.read_packet(make_frame(protocol=protocol, data=data), 9) is None


def test_a_page_names_what_is_compared(trace: Any) -> None:
    place = {"hosts": 2, "rate": "1gbit", "latency_s": 0.01, "n_elements": 100}
    conditions = {"date": "D", "torch": "T", "cores": 2, "load_average_before": 0.5}
    cell = {
        "place": place,
        "conditions": conditions | {"tcp_congestion_control": "cubic"},
        "vote_bytes": 11,
        "reply_bytes": 22,
        "steps": {"gloo": [STEP], "tcp": [[LATE, LATE]]},
    }
    record = {"command": "C", "commits": {"gloo": "aa", "tcp": "bb"}, "cells": [cell]}
    pages = trace.bucket_pages
    *_, table = pages.write_page(record, "name")
    assert table.head == ("part", "Gloo (ms)", "own sockets (ms)")
    assert table.rows[0] == [trace.bucket_parts.ENCODE, "0.01", "0.02"]
    assert table.rows[-1][1:] == ["0.06", "0.06"]
    assert pages.name_cell(cell) == "2 hosts, 10 ms"


@pytest.mark.root
@pytest.mark.slow
def test_a_short_run_has_the_instants_of_every_rank_in_their_order(trace: Any) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("a network lab needs root rights")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    found = trace.tracing.trace_bucket(trace.tracing.Place(2), 1 << 16, steps=2, turns=1)
    assert {name: len(steps) for name, steps in found["steps"].items()} == {"gloo": 2, "tcp": 2}
    names = trace.bucket_parts.INSTANTS
    places = {name: place for place, name in enumerate(names)}
    for step in (step for steps in found["steps"].values() for step in steps):
        for rank, instants in enumerate(step):
            own = [at for name, at in zip(names, instants, strict=True) if "arrived" not in name]
            assert own == sorted(own)
            others = [other for place, other in enumerate(step) if place != rank]
            for what in ("", "reply_"):
                framed = max(other[places[f"{what}framed"]] for other in others)
                arrived, woken = (instants[places[what + each]] for each in ("arrived", "woken"))
                assert framed <= arrived <= woken
