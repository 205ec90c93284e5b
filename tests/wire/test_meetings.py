"""Members of a group find each other, and let nobody in who does not know their keys."""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import distlion
from distlion.errors import InvalidArgumentError
from distlion.step.arguments import LONGEST_S
from distlion.wire import addresses, rendezvous
from distlion.wire.rendezvous import MeetingError, meet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="own sockets need Linux")

LIMIT_S = 20.0
SAID = struct.Struct("<4sHIII16s16s")


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def meet_all(
    store: Any, size: int, *, timeout_s: float = LIMIT_S
) -> list[list[socket.socket | None]]:
    with ThreadPoolExecutor(size) as pool:
        coming = [pool.submit(meet, store, rank, size, timeout_s=timeout_s) for rank in range(size)]
        return [each.result() for each in coming]


def test_each_member_is_connected_to_each_other_one() -> None:
    found = meet_all(dist.HashStore(), 4)  # type: ignore[attr-defined]
    for rank, ends in enumerate(found):
        for peer, end in enumerate(ends):
            assert (end is None) == (peer == rank)
            if end is not None:
                end.setblocking(True)
                end.sendall(bytes([rank, peer]))
    for rank, ends in enumerate(found):
        for peer, end in enumerate(ends):
            if end is not None:
                assert end.recv(2, socket.MSG_WAITALL) == bytes([peer, rank])
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_longest_limit_of_a_step_is_one_of_a_meeting() -> None:
    for ends in meet_all(dist.HashStore(), 3, timeout_s=LONGEST_S):  # type: ignore[attr-defined]
        for end in filter(None, ends):
            end.close()


def test_groups_meet_at_one_port_one_after_the_other() -> None:
    ports = set()
    for _ in range(3):
        store, coming, _ = begin()
        store.set("wire/1", json.dumps([1, "11" * 16, "22" * 32, []]))
        ports.add(where(store)[1])
        end_meeting(store, coming)
    assert len(ports) == 1


def test_groups_may_meet_at_the_same_time() -> None:
    stores = [dist.PrefixStore(name, dist.HashStore()) for name in "ab"]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        for group in pool.map(lambda store: meet_all(store, 3), stores):
            assert [each.count(None) for each in group] == [1, 1, 1]


def test_nothing_listens_once_all_have_met() -> None:
    store, coming, _ = begin()
    meet(store, 1, 2, timeout_s=LIMIT_S)
    coming.result()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where(store), LIMIT_S)


def test_nothing_listens_while_somebody_keeps_the_error_of_a_meeting() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(MeetingError) as kept:
        meet(store, 0, 2, timeout_s=0.05)
    assert any(frame.name == "meet" for frame in kept.traceback), "with all that it refers to"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where(store), LIMIT_S)


def test_a_member_that_does_not_come_is_named() -> None:
    with pytest.raises(MeetingError, match="rank 1 did not come"):
        meet(dist.HashStore(), 0, 2, timeout_s=0.2)  # type: ignore[attr-defined]


def test_ranks_that_errors_name_are_those_of_the_callers_group() -> None:
    for rank, other in ((0, 3), (1, 1)):
        store = dist.HashStore()  # type: ignore[attr-defined]
        with pytest.raises(MeetingError, match=f"rank {other} did not come"):
            meet(store, rank, 2, timeout_s=0.2, names=[1, 3])


def test_a_member_that_publishes_and_does_not_dial_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("wire/1", json.dumps([rendezvous.WIRE_VERSION, "00" * 16, "00" * 32, []]))
    with pytest.raises(MeetingError, match="rank 1 did not connect"):
        meet(store, 0, 2, timeout_s=0.3)


def test_a_member_of_another_version_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("wire/1", json.dumps([rendezvous.WIRE_VERSION + 1, "00" * 16, "00" * 32, []]))
    with pytest.raises(MeetingError, match=r"rank 1 speaks version 2"):
        meet(store, 0, 2, timeout_s=LIMIT_S)


def test_a_listener_that_does_not_know_the_keys_is_refused() -> None:
    """It answers with a proof of other keys, as one that took over an address would."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer_wrongly, args=(server,), daemon=True).start()
    store = dist.HashStore()  # type: ignore[attr-defined]
    own = [rendezvous.WIRE_VERSION, "00" * 16, "00" * 32, [list(server.getsockname())]]
    store.set("wire/0", json.dumps(own))
    with pytest.raises(MeetingError, match=r"rank 0 cannot be reached.*does not know the keys"):
        meet(store, 1, 2, timeout_s=LIMIT_S)
    server.close()


def test_a_first_address_that_is_silent_leaves_time_for_the_second_one() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    store, coming, _ = begin()
    words = json.loads(store.get("wire/0"))
    words[3].insert(0, list(silent.getsockname()))
    store.set("wire/0", json.dumps(words))
    assert meet(store, 1, 2, timeout_s=1.0)[0] is not None
    assert coming.result()[1] is not None
    silent.close()


def test_a_meeting_that_fails_leaves_no_connection_open() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    good, refusing = (socket.create_server(("127.0.0.1", 0)) for _ in "ab")
    refusing.close()
    key, number = "33" * 32, "44" * 16
    accepted: list[bytes] = []

    def answer() -> None:
        connection, _ = good.accept()
        text = connection.recv(SAID.size + 32, socket.MSG_WAITALL)
        keys = bytes.fromhex(key + json.loads(store.get("wire/2"))[2])
        proof = hmac.digest(keys, b"listens" + text[: SAID.size], "sha256")
        connection.sendall(b"DLtp" + proof)
        accepted.append(connection.recv(1))

    answering = threading.Thread(target=answer)
    answering.start()
    for rank, port in ((0, 1), (1, good.getsockname()[1])):
        words = [rendezvous.WIRE_VERSION, number, key, [["127.0.0.1", port]]]
        store.set(f"wire/{rank}", json.dumps(words))
    with pytest.raises(MeetingError, match="rank 0 cannot be reached") as told:
        meet(store, 2, 3, timeout_s=2.0)
    answering.join(LIMIT_S)
    assert accepted == [b""], told
    good.close()


def _answer_wrongly(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.recv(SAID.size + 32, socket.MSG_WAITALL)
    connection.sendall(b"DLtp" + bytes(32))
    connection.recv(1)


def where(store: Any) -> tuple[str, int]:
    """Return an address at which rank 0 listens."""
    host, port = json.loads(store.get("wire/0"))[3][0]
    return host, port


def dial(store: Any, text: bytes) -> socket.socket:
    connection = socket.create_connection(where(store), LIMIT_S)
    connection.sendall(text)
    return connection


def is_refused(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def begin(size: int = 2) -> tuple[Any, Any, bytes]:
    """Let rank 0 wait for others; return the store, its result to come, and its number."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    coming = ThreadPoolExecutor(1).submit(meet, store, 0, size, timeout_s=LIMIT_S)
    store.wait(["wire/0"])
    return store, coming, bytes.fromhex(json.loads(store.get("wire/0"))[1])


@pytest.mark.parametrize(
    "change",
    [
        {"magic": b"XXXX"},
        {"version": 2},
        {"peer": 0},
        {"peer": 2},
        {"asked": 1},
        {"size": 3},
        {"number": bytes(16)},
        {},
    ],
    ids=lambda change: next(iter(change), "a wrong proof"),
)
def test_strangers_are_refused_and_the_member_still_gets_in(change: dict[str, Any]) -> None:
    store, coming, number = begin()
    said = {"magic": b"DLtp", "version": 1, "peer": 1, "asked": 0, "size": 2, "number": number}
    values = (said | change).values()
    store.set("wire/1", json.dumps([1, "11" * 16, "22" * 32, []]))
    assert is_refused(dial(store, SAID.pack(*values, bytes(16)) + bytes(32)))
    keys = json.loads(store.get("wire/0"))[2], "22" * 32
    welcome = dial(store, _prove(number, bytes.fromhex("".join(keys))))
    assert welcome.recv(4, socket.MSG_WAITALL) == b"DLtp"
    assert coming.result()[1] is not None


def _prove(number: bytes, keys: bytes, *, peer: int = 1, size: int = 2) -> bytes:
    said = SAID.pack(b"DLtp", 1, peer, 0, size, number, bytes(16))
    return said + hmac.digest(keys, b"dials" + said, "sha256")


def test_a_member_that_is_connected_does_not_get_in_twice() -> None:
    store, coming, number = begin(3)
    for rank in (1, 2):
        store.set(f"wire/{rank}", json.dumps([1, "11" * 16, "22" * 32, []]))
    keys = bytes.fromhex(json.loads(store.get("wire/0"))[2] + "22" * 32)
    first = dial(store, _prove(number, keys, size=3))
    assert first.recv(36, socket.MSG_WAITALL)[:4] == b"DLtp"
    assert is_refused(dial(store, _prove(number, keys, size=3)))
    first.close()  # it was too late to hear the answer, and dials again
    second = dial(store, _prove(number, keys, size=3))
    assert second.recv(36, socket.MSG_WAITALL)[:4] == b"DLtp"
    third = dial(store, _prove(number, keys, peer=2, size=3))
    assert third.recv(36, socket.MSG_WAITALL)[:4] == b"DLtp"
    ends = coming.result()
    second.sendall(b"x")
    ends[1].setblocking(True)
    assert ends[1].recv(1) == b"x"


def test_who_connects_and_says_nothing_keeps_nobody_out() -> None:
    store, coming, _ = begin(3)
    silent = [dial(store, b"DL" * (turn % 2)) for turn in range(2 * rendezvous._MOST_GUESTS + 9)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        others = list(pool.map(lambda rank: meet(store, rank, 3, timeout_s=LIMIT_S), (1, 2)))
    assert all(ends.count(None) == 1 for ends in (coming.result(), *others))
    assert time.monotonic() - began_s < LIMIT_S / 4
    for each in silent:
        each.close()


def test_of_too_many_strangers_the_oldest_is_closed() -> None:
    store, coming, _ = begin()
    store.set("wire/1", json.dumps([1, "11" * 16, "22" * 32, []]))
    silent = [dial(store, b"") for _ in range(rendezvous._MOST_GUESTS + 1)]
    silent[0].settimeout(LIMIT_S)
    assert is_refused(silent[0])
    for each in silent[1:]:
        each.setblocking(False)
        with pytest.raises(BlockingIOError):
            each.recv(1)
    end_meeting(store, coming)


def end_meeting(store: Any, coming: Any) -> None:
    """Let rank 0 have its other member."""
    words = json.loads(store.get("wire/0"))
    keys = bytes.fromhex(words[2] + "22" * 32)
    with dial(store, _prove(bytes.fromhex(words[1]), keys)) as member:
        assert member.recv(36, socket.MSG_WAITALL)[:4] == b"DLtp"
        coming.result()


def test_a_member_that_is_closed_unheard_dials_again() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(LIMIT_S)
    store = dist.HashStore()  # type: ignore[attr-defined]
    key, number = "33" * 32, "44" * 16
    words = [rendezvous.WIRE_VERSION, number, key, [list(server.getsockname())]]
    store.set("wire/0", json.dumps(words))
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(meet, store, 1, 2, timeout_s=LIMIT_S)
        for _ in range(2):
            server.accept()[0].close()
        connection, _ = server.accept()
        text = connection.recv(SAID.size + 32, socket.MSG_WAITALL)
        keys = bytes.fromhex(key + json.loads(store.get("wire/1"))[2])
        connection.sendall(b"DLtp" + hmac.digest(keys, b"listens" + text[: SAID.size], "sha256"))
        assert coming.result()[0] is not None
    server.close()


def test_a_member_that_is_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says the last byte of its proof when this member has looked for a long time already."""
    store, coming, number = begin()
    store.set("wire/1", json.dumps([1, "11" * 16, "22" * 32, []]))
    looked, look = threading.Event(), rendezvous._Meeting._move

    def count(meeting: Any, limit_s: float) -> None:
        looked.set()
        look(meeting, limit_s)

    monkeypatch.setattr(rendezvous._Meeting, "_move", count)
    keys = bytes.fromhex(json.loads(store.get("wire/0"))[2] + "22" * 32)
    text = _prove(number, keys)
    member = dial(store, text[:-1])
    assert looked.wait(LIMIT_S)
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 0.9 * LIMIT_S)
    monkeypatch.setattr(rendezvous, "time", late)
    looked.clear()
    strangers = dial(store, b"DL")  # so that it looks at the time
    assert looked.wait(LIMIT_S)
    member.sendall(text[-1:])
    assert member.recv(36, socket.MSG_WAITALL)[:4] == b"DLtp"
    assert coming.result()[1] is not None
    strangers.close()


def test_where_too_many_files_are_open_the_oldest_stranger_is_closed() -> None:
    class Full:
        def accept(self) -> None:
            raise OSError("Too many open files")

    meeting = rendezvous._Meeting(0, 2, range(2), LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname(), LIMIT_S)
        server.setblocking(True)
        connection, _ = server.accept()
    connection.setblocking(False)
    guest = meeting._ask(connection)
    meeting._guests[guest] = None
    meeting._begin(guest)
    meeting._accept(Full())  # type: ignore[arg-type]
    assert is_refused(stranger)
    assert not meeting._guests
    meeting.close()


def test_the_port_is_one_of_the_given_range(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    monkeypatch.setenv("DISTLION_WIRE_PORT", f"{port}-{port + 20}")
    (server,) = addresses.listen(["127.0.0.1"], ports=addresses.read_ports())
    assert port < server.getsockname()[1] <= port + 20
    server.close()
    monkeypatch.setenv("DISTLION_WIRE_PORT", str(port))
    with pytest.raises(OSError, match="in use"):
        addresses.listen(["127.0.0.1"], ports=addresses.read_ports())
    with pytest.raises(MeetingError, match=r"no port to listen at.*in use"):
        meet(dist.HashStore(), 0, 2, timeout_s=LIMIT_S)  # type: ignore[attr-defined]
    taken.close()


def test_a_fork_keeps_no_port_open() -> None:
    store, coming, _ = begin()
    go, runs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])
        os.write(runs[1], b"x")  # it has closed its copies by now
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(runs[0], 1) == b"x"
        meet(store, 1, 2, timeout_s=LIMIT_S)
        coming.result()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where(store), LIMIT_S)
    finally:
        os.close(go[1])
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("text", ["x", "-1", "70000", "9-8", "1-x"])
def test_what_is_no_port_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLION_WIRE_PORT", text)
    with pytest.raises(InvalidArgumentError, match="DISTLION_WIRE_PORT"):
        addresses.read_ports()


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(InvalidArgumentError, match="GLOO_SOCKET_IFNAME=nosuch0"):
        addresses.list_hosts(None)


def test_addresses_of_both_families_are_listened_at() -> None:
    hosts = addresses.list_hosts(None)
    assert hosts[0] == "127.0.0.1"
    servers = addresses.listen(hosts)
    assert {server.getsockname()[0] for server in servers} == set(hosts)
    assert len({server.getsockname()[1] for server in servers}) == 1
    for server in servers:
        server.close()


def test_without_an_interface_the_address_is_that_toward_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert addresses.list_hosts(("127.0.0.1", 80))[0] == "127.0.0.1"


def test_an_address_of_another_host_is_left_out() -> None:
    (server,) = addresses.listen(["198.51.100.1", "127.0.0.1"])  # that of documents
    assert server.getsockname()[0] == "127.0.0.1"
    server.close()
    with pytest.raises(OSError, match="Cannot assign requested address"):
        addresses.listen(["198.51.100.1"])


def test_where_it_listens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distlion")
    (server,) = addresses.listen(["127.0.0.1"])
    port = server.getsockname()[1]
    server.close()
    (server,) = addresses.listen(["127.0.0.1"], ports=(port, port))
    server.close()
    assert caplog.messages == [f"listens at 127.0.0.1, port {port}"]


def test_connections_give_signs_of_life_for_long() -> None:
    with socket.socket() as connection:
        rendezvous._prepare(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, most = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle == every == 60  # NAT forgets after some minutes
    assert every * most >= distlion.Timeouts().busy_s
