"""Members of a group find each other, and let nobody in who does not know their keys."""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from distlion.errors import InvalidArgumentError
from distlion.wire import addresses, rendezvous
from distlion.wire.rendezvous import MeetingError, meet

LIMIT_S = 20.0
SAID = struct.Struct("<4sHIII16s16s")


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def meet_all(store: Any, size: int) -> list[list[socket.socket | None]]:
    with ThreadPoolExecutor(size) as pool:
        coming = [pool.submit(meet, store, rank, size, timeout_s=LIMIT_S) for rank in range(size)]
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


def test_groups_that_meet_at_the_same_time_share_one_port() -> None:
    stores = [dist.PrefixStore(name, dist.HashStore()) for name in "ab"]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda store: meet_all(store, 3), stores))
    ports = {
        end.getsockname()[1]
        for group in found
        for rank, ends in enumerate(group)
        for end in ends[rank + 1 :]
        if end is not None
    }
    assert len(ports) == 1


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


def dial(text: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", listen_here().addresses[0][1]), LIMIT_S)
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
    assert is_refused(dial(SAID.pack(*values, bytes(16)) + bytes(32)))
    keys = json.loads(store.get("wire/0"))[2], "22" * 32
    welcome = dial(_prove(number, bytes.fromhex("".join(keys))))
    assert welcome.recv(4, socket.MSG_WAITALL) == b"DLtp"
    assert coming.result()[1] is not None
    # Nobody gets in twice, or later.
    assert is_refused(dial(_prove(number, bytes.fromhex("".join(keys)))))


def _prove(number: bytes, keys: bytes) -> bytes:
    said = SAID.pack(b"DLtp", 1, 1, 0, 2, number, bytes(16))
    return said + hmac.digest(keys, b"dials" + said, "sha256")


def listen_here() -> Any:
    return rendezvous._listen(addresses.list_hosts(None))


def test_who_connects_and_says_nothing_keeps_nobody_out() -> None:
    listen_here()
    silent = [dial(b"") for _ in range(20)]
    began_s = time.monotonic()
    meet_all(dist.HashStore(), 3)  # type: ignore[attr-defined]
    assert time.monotonic() - began_s < rendezvous._PROVE_S
    for each in silent:
        each.close()


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
    with pytest.raises(MeetingError, match="no port to listen at"):
        rendezvous._Listener(["127.0.0.1"])
    taken.close()


def test_a_fork_has_no_listener() -> None:
    listen_here()
    child = os.fork()
    if child == 0:
        os._exit(len(rendezvous._listeners))
    assert os.waitpid(child, 0)[1] == 0
    meet_all(dist.HashStore(), 2)  # type: ignore[attr-defined]


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
