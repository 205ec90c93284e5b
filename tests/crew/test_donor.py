"""A donor streams to its newcomer while it trains, and to nobody else."""

from __future__ import annotations

import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
from distlion.crew import replies, side_link
from distlion.crew.catch_up import TRIES, CatchUp, LostDonorError, Newcomer
from distlion.crew.donor import Donor, Feed, Pace
from distlion.crew.epoch import Epoch, Member, order_members
from distlion.crew.offers import name_join
from distlion.crew.replies import StepReply
from distlion.crew.side_link import Listener, SideLink, dial
from distlion.crew.signed import SignedStore
from distlion.errors import CrewError
from replied_run import Run, copy_piece, make_replica

NEWCOMER, OWN, NUMBER = 7, 0, 1
TOWARD = ("127.0.0.1", 1)


class Optimizer:
    """The part of an optimizer that a donor uses."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def committed_step(self) -> int:
        return self._run.step

    def list_all(self) -> list[torch.Tensor]:
        return list(self._run.params)


class Serving:
    """A donor that serves one newcomer."""

    def __init__(self, **options: Any) -> None:
        self.run = Run(distlion.MajorityVote(), torch.float32)
        self.store = SignedStore(dist.HashStore(), b"key of the run")  # type: ignore[attr-defined]
        rendezvous: Any = SimpleNamespace(store=self.store, address=TOWARD)
        self.donor = Donor(rendezvous, **options)
        self._optimizer = Optimizer(self.run)
        self.donor.bind(self._optimizer, "")  # type: ignore[arg-type]
        self.listener = Listener(TOWARD)
        self.feed = Feed(self.donor, self.listener, NUMBER, OWN, NEWCOMER)
        self.donor._feeds.append(self.feed)
        self.feed.start()

    def dial(self) -> SideLink:
        link = dial(
            self.listener.addresses, name_join(NUMBER), self.store.sign, self.listener.nonce
        )
        await_true(lambda: self.feed._has_begun)
        return link

    def step(self) -> None:
        donor: Any = self.donor
        donor.amend(SimpleNamespace())
        donor.exchange([], None)
        donor.commit([self.run.commit()])
        donor.end()


def await_true(holds: Callable[[], bool], limit_s: float = 30) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PIECE_BYTES", 256)
    read = classmethod(lambda cls, inputs, buckets: buckets[0])
    monkeypatch.setattr(StepReply, "of", read)


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.donor.stop()


def test_a_newcomer_has_the_donors_bits_after_any_step(serving: Serving) -> None:
    replica, own = make_replica(serving.run)
    catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
    await_true(lambda: catch_up.n_bytes > 512)
    for _ in range(7):
        serving.step()
    await_true(lambda: catch_up.is_close or bool(catch_up.problem))
    serving.step()
    catch_up.arrive(serving.run.step)
    assert all(map(torch.equal, serving.run.params, own))
    assert catch_up.n_replies > 0
    serving.step()
    time.sleep(0.05)
    assert catch_up.step == serving.run.step - 1  # nothing is written any more
    catch_up.end()


def test_no_piece_is_copied_while_a_step_is_committed(serving: Serving) -> None:
    donor: Any = serving.donor
    donor.exchange([], None)
    link = dial(
        serving.listener.addresses, name_join(NUMBER), serving.store.sign, serving.listener.nonce
    )
    link._connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        link.receive(1 << 20)
    donor.end()
    link._connection.settimeout(10)
    assert link.receive(1 << 20)[0]["kind"] == "piece"
    link.close()


def test_a_newcomer_that_is_too_slow_is_told_and_no_more_is_kept_for_it() -> None:
    serving = Serving(replay_steps=2)
    link = serving.dial()
    assert link.receive(1 << 20)[0]["kind"] == "piece"  # of which nothing is said
    for _ in range(5):
        serving.step()
        assert len(serving.feed._waiting) <= 2
    link.send({})
    assert link.receive(1 << 20)[0]["kind"] == "behind"
    await_true(lambda: not serving.feed.is_running)
    link.close()


def test_pieces_come_at_the_given_rate() -> None:
    serving = Serving(rate_bit_per_s=8 * 256 / 0.02)  # 256 bytes in 20 ms
    replica, _ = make_replica(serving.run)
    began_s = time.monotonic()
    catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
    await_true(lambda: replica.is_complete)
    assert time.monotonic() - began_s > 0.9 * catch_up.n_bytes / 256 * 0.02
    catch_up.end()
    serving.donor.stop()


def note(pace: Pace, n_bytes: int, took_s: float) -> float:
    """Note a piece that is sent when it is due; return seconds until the next one is."""
    began_s = max(0.0, pace.due_s)
    pace.note(n_bytes, began_s, began_s + took_s)
    return pace.due_s - began_s


def test_half_of_the_links_time_is_left_to_votes_and_busy_cores_count_as_that_half() -> None:
    pace = Pace(None)
    assert note(pace, 1000, 0.01) == pytest.approx(0.02)
    assert note(pace, 1000, 0.05) == pytest.approx(0.02)  # no wait behind a slow one
    assert note(pace, 500, 0.01) == pytest.approx(0.01)
    intervals = [note(pace, 1000, 0.04) for _ in range(40)]
    assert intervals[0] == pytest.approx(0.02)
    assert intervals[-1] == pytest.approx(0.08)  # the link has become slower


def test_a_given_rate_is_kept_whatever_pieces_take() -> None:
    pace = Pace(8e6)
    assert note(pace, 1000, 0.5) == pytest.approx(0.001)


def test_what_a_vote_took_from_the_stream_is_made_up_for() -> None:
    pace, n_sent = Pace(8e6), 0  # 1000 bytes in 1 ms
    pace.note(1000, 0.0, 0.001)
    for began_ms in range(500, 1000):  # no piece was sent during half a second
        while pace.due_s <= began_ms / 1000:
            pace.note(1000, began_ms / 1000, began_ms / 1000)
            n_sent += 1
    assert n_sent == pytest.approx(1000, abs=2)


def test_no_more_is_made_up_for_than_two_seconds() -> None:
    pace, n_sent = Pace(8e6), 0
    pace.note(1000, 0.0, 0.001)
    while pace.due_s <= 60.0:
        pace.note(1000, 60.0, 60.0)
        n_sent += 1
    assert n_sent == pytest.approx(2000, abs=2)


def test_nothing_is_sent_to_who_does_not_know_the_secret(serving: Serving) -> None:
    stranger = SignedStore(dist.HashStore(), b"another key")  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="closed"):
        dial(serving.listener.addresses, name_join(NUMBER), stranger.sign, serving.listener.nonce)
    assert not serving.feed._has_begun
    serving.dial().close()  # it still waits for the newcomer


def test_who_answers_without_the_secret_is_not_believed(serving: Serving) -> None:
    listener = Listener(TOWARD)

    def lie() -> None:
        link = SideLink(listener._servers[0].accept()[0])
        link.receive(0)
        link.send({"proof": "none"})

    thread = threading.Thread(target=lie)
    thread.start()
    with pytest.raises(OSError, match="does not know the secret"):
        dial(listener.addresses[:1], name_join(NUMBER), serving.store.sign, listener.nonce)
    thread.join()
    listener.close()


def test_a_donor_that_stops_is_noticed(serving: Serving) -> None:
    replica, _ = make_replica(serving.run)
    catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
    await_true(lambda: catch_up.is_close)
    serving.donor.stop()
    await_true(lambda: bool(catch_up.problem))
    with pytest.raises(LostDonorError, match="closed"):
        catch_up.arrive(5)


def test_a_newcomer_that_gives_up_has_its_own_parameters_again(serving: Serving) -> None:
    replica, own = make_replica(serving.run)
    optimizer: Any = SimpleNamespace(list_all=lambda: own)
    newcomer = Newcomer(serving.donor._rendezvous, "", optimizer)
    before = [param.detach().clone() for param in own]
    newcomer._params, newcomer._kept = own, [param.clone() for param in before]
    newcomer._catch_up = catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
    await_true(lambda: catch_up.is_close)
    assert not torch.equal(own[0], before[0])
    newcomer.give_up()
    assert all(map(torch.equal, own, before))
    assert newcomer.is_ready(True)


def list_messages(run: Run) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Make a donor's messages: all pieces, two steps that are heard of, three that are replayed."""
    nothing = torch.empty(0, dtype=torch.uint8)
    for number, piece in enumerate(replies.cut_pieces(run.params)):
        yield {"kind": "piece", "number": number, "step": 0, "head": 0}, copy_piece(run, piece)
    for head in (1, 2):
        yield {"kind": "beat", "head": head}, nothing
    for _ in range(3):
        reply = run.commit()
        payload = torch.cat([bucket.payload for bucket in reply.buckets])
        yield {"kind": "reply", "head": 3, **reply.describe()}, payload


def test_a_newcomer_is_let_in_a_step_behind_and_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlion.crew.catch_up.run_in_background", lambda *run: None)
    run = Run(distlion.MajorityVote(), torch.float32)
    replica, _ = make_replica(run)
    messages = list_messages(run)
    link: Any = SimpleNamespace(receive=lambda most_bytes: next(messages), send=lambda header: None)
    newcomer = Newcomer(SimpleNamespace(), "", SimpleNamespace())  # type: ignore[arg-type]
    newcomer._catch_up = catch_up = CatchUp(link, NEWCOMER, OWN, replica)
    while not replica.is_complete:
        assert not newcomer.is_ready(True)
        catch_up._take_message()
    behind = []
    for _ in range(5):
        catch_up._take_message()
        assert catch_up.step is not None
        behind.append((catch_up._head - catch_up.step, newcomer.is_ready(True)))
    assert behind == [(1, True), (2, False), (2, False), (1, True), (0, True)]


def test_a_newcomer_whose_donor_is_no_member_follows_it_no_further(serving: Serving) -> None:
    newcomer, _ = follow(serving)
    with pytest.raises(LostDonorError, match="without it"):
        newcomer.is_ready(False)
    assert newcomer._catch_up is not None
    assert newcomer._catch_up.problem


@pytest.mark.parametrize("has_entered", [False, True])
def test_a_newcomer_that_falls_behind_each_time_says_so(
    has_entered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[Serving]()

    def begin(newcomer: Newcomer, own: Member) -> bool:
        served.append(serving := Serving())
        replica, params = make_replica(serving.run)
        newcomer._tries += 1
        newcomer._params, newcomer._kept = params, [param.clone() for param in params]
        newcomer._catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
        with serving.donor.lock:
            serving.feed.lose()
        return True

    monkeypatch.setattr(Newcomer, "_begin", begin)
    rendezvous: Any = SimpleNamespace(find_last_begun=lambda: 3)
    newcomer = Newcomer(rendezvous, "", SimpleNamespace())  # type: ignore[arg-type]
    newcomer._has_entered = has_entered
    own = make_member(NEWCOMER, 0, 0)
    if has_entered:  # a member that woke joins while the others wait
        assert newcomer.find_donor(own) is None
    else:
        with pytest.raises(CrewError, match="fallen behind the others 3 times"):
            newcomer.find_donor(own)
    assert len(served) == TRIES
    assert newcomer._catch_up is None


def test_an_unknown_error_of_the_replay_ends_the_attempt(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, _ = make_replica(serving.run)

    def fail(reply: StepReply) -> None:
        raise RuntimeError("no memory for the reply")

    monkeypatch.setattr(replica, "replay", fail)
    catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
    serving.step()
    await_true(lambda: bool(catch_up.problem))
    assert catch_up.problem == "no memory for the reply"
    catch_up.end()


def test_a_reply_that_cannot_be_kept_ends_no_step(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(inputs: object, buckets: object) -> StepReply:
        raise MemoryError

    monkeypatch.setattr(StepReply, "of", fail)
    link = serving.dial()
    serving.step()
    assert link.receive(1 << 20)[0]["kind"] == "piece"
    link.send({})
    assert link.receive(1 << 20)[0]["kind"] == "behind"
    link.close()


def test_replies_are_copied_only_while_somebody_is_served(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_copied, read = 0, StepReply.of

    def count(inputs: Any, buckets: Any) -> StepReply:
        nonlocal n_copied
        n_copied += 1
        return read(inputs, buckets)

    monkeypatch.setattr(StepReply, "of", count)
    link = serving.dial()
    serving.step()
    assert n_copied == 1
    link.close()
    await_true(lambda: not serving.feed.is_running)
    serving.step()
    assert n_copied == 1


def test_a_donor_without_a_thread_for_a_newcomer_trains_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("distlion.crew.donor.run_in_background", fail)
    serving = Serving()
    assert "worker 0 cannot serve worker 7: can't start new thread" in caplog.text
    assert serving.donor.n_served == 0
    assert serving.listener._servers[0].fileno() == -1
    serving.step()


def follow(serving: Serving) -> tuple[Newcomer, Any]:
    """Return a newcomer that has caught up, and the epoch whose members are a step further."""
    replica, own = make_replica(serving.run)
    optimizer: Any = SimpleNamespace(list_all=lambda: own)
    newcomer = Newcomer(serving.donor._rendezvous, "", optimizer)
    newcomer._params, newcomer._kept = own, [param.detach().clone() for param in own]
    newcomer._catch_up = catch_up = CatchUp(serving.dial(), NEWCOMER, OWN, replica)
    await_true(lambda: catch_up.is_close)
    later = make_member(OWN, 3, serving.run.step + 1)
    own_now = make_member(NEWCOMER, 0, 0, donor=OWN)
    members = tuple(order_members([later, own_now]))
    return newcomer, Epoch(4, members, 1, serving.store)


def test_a_newcomer_whose_last_reply_is_late_follows_further(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlion.crew.catch_up.ARRIVE_S", 0.05)
    newcomer, epoch = follow(serving)
    with pytest.raises(LostDonorError, match="did not come"):
        newcomer.arrive(epoch)
    serving.step()
    assert newcomer.find_donor(make_member(NEWCOMER, 0, 0)) == OWN
    await_true(lambda: newcomer.is_ready(True))
    newcomer.arrive(epoch)
    newcomer.enter(NEWCOMER)


def test_a_newcomer_whose_last_reply_is_always_late_joins_the_old_way(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlion.crew.catch_up.ARRIVE_S", 0.05)
    newcomer, epoch = follow(serving)
    for _ in range(TRIES):
        with pytest.raises(LostDonorError, match="did not come"):
            newcomer.arrive(epoch)
    assert newcomer._catch_up is None
    assert "too large for this link" in newcomer._problem


@pytest.mark.parametrize("header", [b"[1]", b"[" * 2000, b"no json"], ids=["list", "deep", "text"])
def test_a_strangers_message_ends_its_connection_alone(serving: Serving, header: bytes) -> None:
    host, port = serving.listener.addresses[0]
    with socket.create_connection((host, port), timeout=10) as stranger:
        check = zlib.crc32(b"", zlib.crc32(header))
        stranger.sendall(side_link._PREFIX.pack(side_link._MAGIC, len(header), 0, check) + header)
        assert stranger.recv(1) == b""
    serving.dial().close()  # it still waits for the newcomer


def test_a_stranger_cannot_make_a_donor_read_for_long(serving: Serving) -> None:
    host, port = serving.listener.addresses[0]
    with socket.create_connection((host, port), timeout=10) as stranger:
        stranger.sendall(side_link._PREFIX.pack(side_link._MAGIC, 1 << 20, 0, 0))
        assert stranger.recv(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the interface lo is Linux's")
def test_a_donor_listens_only_at_the_interface_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    listener = Listener(TOWARD)
    hosts = {each.getsockname()[0] for each in listener._servers}
    assert "127.0.0.1" in hosts
    assert hosts == {host for host, _ in listener.addresses} <= {"127.0.0.1", "::1"}
    listener.close()


def test_a_large_message_has_time_for_each_of_its_parts() -> None:
    sent: list[int] = []
    connection: Any = SimpleNamespace(
        settimeout=lambda seconds: None,
        setsockopt=lambda *options: None,
        sendall=lambda part: sent.append(len(part)),
    )
    SideLink(connection).send({}, torch.zeros((5 << 20) + 3, dtype=torch.uint8))
    assert max(sent) <= 1 << 20
    assert sum(sent) == side_link._PREFIX.size + 2 + (5 << 20) + 3


def make_member(identity: int, epoch: int, step: int, donor: int | None = None) -> Member:
    return Member(identity, epoch, step, 1, "host", 1, donor=donor)


def test_a_newcomer_counts_as_advanced_as_its_donor() -> None:
    members = order_members(
        [make_member(1, 0, 0, donor=4), make_member(4, 3, 8), make_member(2, 3, 7)]
    )
    assert [member.id for member in members] == [4, 1, 2]
    assert [member.follows for member in members] == [(), (3, 8, 0), ()]


@pytest.mark.parametrize("donor", [2, 9])
def test_a_newcomer_whose_donor_is_behind_or_gone_has_nothing(donor: int) -> None:
    members = order_members(
        [make_member(1, 0, 0, donor=donor), make_member(4, 3, 8), make_member(2, 3, 7)]
    )
    assert [member.id for member in members] == [4, 2, 1]
    assert not any(member.follows for member in members)


@pytest.mark.parametrize(
    ("culprits", "blamed"),
    [((2,), (1, 2, 3)), ((0, 4), (1, 2, 3)), ((0,), ()), ((0, 2), ()), ((), (1, 2, 3))],
    ids=["a follower", "all that have trained", "one that has", "one of each", "no majority"],
)
def test_followers_are_blamed_where_those_that_have_trained_agree(
    culprits: tuple[int, ...], blamed: tuple[int, ...]
) -> None:
    later = [make_member(number, 0, 0, donor=4) for number in (5, 6, 7)]
    members = order_members([make_member(4, 3, 8), *later, make_member(9, 3, 8)])
    at = {member.id: rank for rank, member in enumerate(members)}
    by_place = [at[number] for number in (4, 5, 6, 7, 9)]
    epoch = Epoch(1, tuple(members), 0, SignedStore(dist.HashStore(), b"key"))  # type: ignore[attr-defined]
    found = epoch.find_misled([by_place[place] for place in culprits])
    assert found == tuple(sorted(by_place[place] for place in blamed))
