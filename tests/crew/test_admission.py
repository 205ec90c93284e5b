"""Workers ask those who train to let them in."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from asks import (
    SETTINGS,
    ask_of,
    make_epoch,
    make_lookout,
    make_member,
    make_rendezvous,
    make_store,
    put_ask,
)
from crews import await_true
from distlion.crew import admission, epoch, lifeline, lookout, membership
from distlion.crew.admission import Ask, ask, list_asks
from distlion.crew.epoch import Epoch, FormingError, Member, TooFewError
from distlion.crew.lanes import OneLane
from distlion.crew.membership import Membership, Patience, decide_among
from distlion.crew.memory import Memory, read_begun
from distlion.errors import CrewError


def test_who_asks_is_let_in_by_the_first_to_decide_and_by_nobody_else() -> None:
    store = make_store()
    before, records = make_epoch(store, 0, 1), [{"id": 0}, {"id": 1}]
    first = put_ask(store, 1, make_member(7, epoch=0), is_ready=True)
    membership._decide(make_rendezvous(store), before, records)
    assert list_asks(store) == []
    second = put_ask(store, 2, make_member(8, epoch=0), is_ready=True)
    membership._decide(make_rendezvous(store), before, records)
    assert store.check([first.answer])
    assert not store.check([second.answer])
    assert list_asks(store) == [second]


@pytest.mark.parametrize(
    ("asks", "places", "let_in"),
    [
        ([(7, SETTINGS, True), (8, SETTINGS, True)], 9, [7, 8]),
        ([(7, SETTINGS, True), (8, SETTINGS, True)], 3, [7]),
        ([(7, SETTINGS, False), (8, SETTINGS + 1, True)], 9, []),
    ],
)
def test_only_who_is_ready_alike_and_has_a_place_is_let_in(
    asks: list[Any], places: int, let_in: list[int]
) -> None:
    store = make_store()
    for number, (identity, settings, is_ready) in enumerate(asks):
        put_ask(store, number, make_member(identity, settings=settings), is_ready=is_ready)
    before, own = make_epoch(store, 0, 1), make_member(0)
    records = [vars(member) for member in before.members]
    rendezvous = make_rendezvous(store, places)
    membership._decide(rendezvous, before, records)
    found = membership.follow(rendezvous, before, own, (), min_workers=2, until_s=0)
    assert found is not None
    assert [found.members[rank].id for rank in found.guests] == let_in
    assert sorted(member.id for member in found.members) == [0, 1, *let_in]


@pytest.mark.parametrize(
    ("last_epochs", "there", "goes_on"),
    [
        ((3, 3, 0, 0), (6, 7), False),
        ((3, 3, 1, 0), (6, 7), False),
        ((3, 3, 0, 0), (1, 7), True),
        ((0, 0, 0, 0), (6, 7), True),
    ],
    ids=["newcomers", "one is back", "one has trained to the end", "none has trained yet"],
)
def test_nobody_decides_on_an_epoch_without_one_of_the_most_advanced(
    last_epochs: Sequence[int], there: Sequence[int], *, goes_on: bool
) -> None:
    store = make_store()
    members = [
        make_member(identity, epoch=last)
        for identity, last in zip((0, 1, 6, 7), last_epochs, strict=True)
    ]
    before = replace(make_epoch(store, 0, 1), members=tuple(members), place=3)
    for identity in there:
        record = next(each.describe() for each in members if each.id == identity)
        before.store.set(f"next/{identity}", json.dumps(record))
    found = membership.follow(
        make_rendezvous(store), before, members[3], (), min_workers=2, until_s=0
    )
    assert (found is not None) == goes_on
    assert before.store.check(["decision"]) == goes_on
    if not goes_on:
        assert not before.store.check(["next/7"])  # nobody counts on it any more


def test_one_that_asks_alone_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SEEN_S", 0.1)
    store = make_store()
    with pytest.raises(TooFewError, match="fewer than 2 workers came"):
        ask_of(make_rendezvous(store), make_member(7), limit_s=0.3)
    assert list_asks(store) == []


def test_one_that_follows_a_worker_outside_hears_of_it() -> None:
    store, look, heard = make_store(), None, list[bool]()
    follower = replace(make_member(7, epoch=0), donor=4)

    def is_ready(donor_trains: bool) -> bool:
        heard.append(donor_trains)
        raise FormingError("its donor is gone")

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            ask,
            make_rendezvous(store),
            follower,
            min_workers=2,
            limit_s=60,
            decide=lambda asks: None,
            is_ready=is_ready,
        )
        await_true(lambda: bool(list_asks(store)))
        look, members = make_lookout(store), make_epoch(store, 0, 1)
        assert not look._look_for_asks(members)
        with pytest.raises(FormingError, match="its donor is gone"):
            asked.result()
    assert heard == [False]
    assert list_asks(store) == []
    look.ended.set()


def test_one_that_is_seen_waits_for_as_long_as_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr(admission, "time", clock)
    store, found = make_store(), list[Any]()
    asking = threading.Thread(
        target=lambda: found.append(ask_of(make_rendezvous(store), make_member(7)))
    )
    asking.start()
    look, members = make_lookout(store), make_epoch(store, 0, 1)
    await_true(lambda: bool(list_asks(store)))
    (its,) = list_asks(store)
    wanted = []
    for _ in range(4):
        look._n_looks += 1
        wanted.append(look._look_for_asks(members))
        await_true(lambda: store.check([its.ready]) and store.get(its.ready) == store.get(its.seen))
        now_s += 2 / 3 * admission.SEEN_S
    # It may answer while it is looked for, and is then not new in the next look.
    assert any(wanted[1:])
    assert asking.is_alive()
    membership._decide(make_rendezvous(store), members, [vars(each) for each in members.members])
    asking.join()
    assert [record["id"] for record in found[0]["members"]] == [0, 1, 7]
    look.ended.set()


def test_a_member_that_was_left_behind_answers_nobody() -> None:
    store = make_store()
    asked = put_ask(store, 1, replace(make_member(7, epoch=0), donor=4), is_ready=True)
    look, members = make_lookout(store), make_epoch(store, 0, 1)
    look._rendezvous.find_last_begun = lambda: members.number + 1  # type: ignore[method-assign]
    look.watch(members, longest_operation_s=1, users_operation_s=1)
    look._look(members)
    assert look.is_left_behind
    assert not store.check([asked.seen])
    look.ended.set()


def test_one_that_has_died_ends_no_second_epoch() -> None:
    store = make_store()
    put_ask(store, 1, make_member(7), is_ready=True)
    look, members = make_lookout(store), make_epoch(store, 0, 1)
    assert look._look_for_asks(members)
    assert not look._look_for_asks(members)
    look.ended.set()


def test_a_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    look, members = make_lookout(store), make_epoch(store, 0, 1)
    look.watch(members, longest_operation_s=1, users_operation_s=1)
    with pytest.raises(CrewError, match="same script"):
        ask_of(make_rendezvous(store), make_member(7, settings=SETTINGS + 1))
    assert not look.wants_change
    look.ended.set()


def test_who_asks_where_no_place_is_left_is_seen_and_ends_no_epoch() -> None:
    store = make_store()
    made = put_ask(store, 1, make_member(7), is_ready=True)
    look, members = make_lookout(store, places=2), make_epoch(store, 0, 1)
    assert not look._look_for_asks(members)
    assert store.check([made.seen])
    look.ended.set()


@pytest.mark.parametrize(
    ("listed", "n_left_out"),
    [
        ('[{"number": 1}, 7, {"number": 2, "member": {"name": "another"}}]', 3),
        ("7", 1),
        ('["', 1),
        ('{"number": 1}', 1),
        ("[" * 100_000, 1),
    ],
)
def test_what_is_no_ask_is_left_out_and_logged(
    listed: str, n_left_out: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    store.plain.set("asking", listed)
    assert list_asks(store) == []
    assert len(caplog.records) == n_left_out
    assert "in an unknown format" in caplog.text
    made = put_ask(store, 3, make_member(7), is_ready=False)
    assert list_asks(store) == [made]


@pytest.mark.parametrize("signature", ["7", "null", '"\\ud800"', '"\\u00e9"'])
def test_a_signature_of_any_kind_is_none_of_ours(
    signature: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    member = json.dumps(make_member(7).describe())
    ask = f'[{{"number": 1, "member": {member}, "signature": {signature}}}]'
    store.plain.set("asking", ask)
    assert list_asks(store) == []
    assert len(caplog.records) == 1


def test_one_with_another_secret_is_seen_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "SEEN_S", 0.1)
    store = make_store()
    stranger = make_store(b"another", store.plain)
    put_ask(stranger, 1, make_member(7), is_ready=True)
    look, members = make_lookout(store), make_epoch(store, 0, 1)
    assert not look._look_for_asks(members)
    assert not store.check([Ask(1, make_member(7)).seen])
    assert "worker 7 (host, process 107) asks the crew with another secret" in caplog.text
    look.ended.set()


def test_a_forged_ask_has_no_signature_that_fits() -> None:
    store = make_store()
    made = put_ask(store, 1, make_member(7), is_ready=True)
    (ask,) = json.loads(store.plain.get("asking"))
    for forged in ({**ask, "number": 2}, {**ask, "member": make_member(8).describe()}):
        store.plain.set("asking", json.dumps([forged]))
        assert list_asks(store) == []
    store.plain.set("asking", json.dumps([ask]))
    assert list_asks(store) == [made]


def test_a_value_that_nobody_of_the_run_has_written_is_named() -> None:
    store = make_store()
    store.set("begun", "abc")
    with pytest.raises(CrewError, match=r"'begun' = 'abc', which this worker cannot read"):
        store.read("begun", int)
    store.plain.set("begun", "3")
    with pytest.raises(CrewError, match=r"'begun' = '3', which was not signed with the secret"):
        store.read("begun", int)
    for other in (store.at("epoch 3"), make_store(b"another", store.plain)):
        other.set("begun", "3")
        assert other.get("begun") == "3"
        store.plain.set("begun", other.plain.get("begun"))
        with pytest.raises(CrewError, match="same secret"):
            store.get("begun")
        with pytest.raises(CrewError, match="same secret"):
            store.compare_set("begun", "3", "4")


@pytest.mark.parametrize(
    ("culprits", "blamed"), [((3,), (3,)), ((), (2, 3)), ((0, 1), (2, 3)), ((1, 2), (2,))]
)
def test_only_those_that_join_are_blamed(culprits: Any, blamed: Any) -> None:
    """Rank 2 was stopped and comes back, rank 3 is new."""
    members = tuple(make_member(each, epoch=3 * (each < 3)) for each in range(4))
    found = Epoch(4, members, 0, make_store(), guests=(2, 3))
    assert found.find_misfits(culprits) == blamed
    first = Epoch(1, tuple(make_member(each, epoch=0) for each in range(2)), 0, make_store())
    assert first.find_misfits((1,)) == ()


def test_a_lookout_says_which_value_it_cannot_read() -> None:
    store = make_store()
    store.plain.set("begun", "abc")
    look = lookout.Lookout(make_rendezvous(store), 0, OneLane())
    look._rendezvous.find_last_begun = lambda: store.read("begun", int)  # type: ignore[method-assign]
    look._look(make_epoch(store, 0, 1))
    with pytest.raises(CrewError, match="'begun' = 'abc'"):
        _ = look.wants_change
    look.ended.set()


def test_the_roll_has_one_outcome() -> None:
    store = make_store()
    first, second = make_epoch(store, 0, 1), make_epoch(store, 0, 1)
    with pytest.raises(epoch.MissingError) as caught:
        epoch.call_roll(first)
    assert caught.value.culprits == (1,)
    late = Epoch(second.number, second.members, 1, second.store)
    with pytest.raises(epoch.MissingError) as caught:
        epoch.call_roll(late)
    assert caught.value.culprits == (1,)


def test_a_system_that_lists_no_connections_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(lifeline, "_OPEN_FILES", str(tmp_path / "absent"))
    line = lifeline.Lifeline(
        lambda: dist.TCPStore("127.0.0.1", store.port, is_master=False),  # type: ignore[attr-defined]
        5.0,
    )
    line.end()
    assert f"{tmp_path / 'absent'} does not list the connections" in caplog.text


def make_double(identity: int) -> Member:
    """Make a worker that an empty store has given a number anew, in a process of its own."""
    return replace(make_member(identity, epoch=0), pid=1)


def test_a_worker_with_the_number_of_a_member_is_refused_and_not_let_in() -> None:
    store = make_store()
    before = make_epoch(store, 0, 1)
    double = put_ask(store, 1, make_double(1), is_ready=True)
    woken = put_ask(store, 2, make_member(1), is_ready=True)  # a member that others gave up
    assert admission.list_ready(store, SETTINGS, before.members) == [woken]
    look = make_lookout(store)
    look._look_for_asks(before)
    assert "the number 1 of this worker is another one's" in store.get(double.answer)
    assert list_asks(store) == [woken]
    look.ended.set()


def test_of_two_that_ask_with_one_number_the_less_advanced_is_refused() -> None:
    store = make_store()
    double = put_ask(store, 1, make_double(1), is_ready=True)
    trained = [put_ask(store, 2 + each, make_member(each), is_ready=True) for each in range(2)]
    decide_among(make_rendezvous(store), list_asks(store), min_workers=2)
    assert "Start it again" in store.get(double.answer)
    assert all(store.read(each.answer, json.loads)["epoch"] == 1 for each in trained)


def test_of_two_that_ask_with_one_number_the_one_that_has_trained_stays() -> None:
    store = make_store()
    double = put_ask(store, 1, make_double(1), is_ready=True)
    woken = put_ask(store, 2, make_member(1), is_ready=True)
    members = make_epoch(store, 0, 2)
    assert admission.list_ready(store, SETTINGS, members.members) == [woken]
    look = make_lookout(store)
    look._look_for_asks(members)
    assert store.check([double.answer])
    assert list_asks(store) == [woken]
    look.ended.set()


@pytest.mark.parametrize("epoch", [0, 3])
def test_who_has_not_trained_waits_for_members_before_each_ask(
    monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    made, calls = Membership.__new__(Membership), list[str]()
    made.rendezvous, made.min_workers = make_rendezvous(make_store()), 2
    made.id, made.patience, made.ended = 7, Patience(60), threading.Event()
    made._known_begun, made.lookout = {0}, make_lookout(made.rendezvous.store)
    monkeypatch.setattr(
        made.rendezvous, "await_members", lambda: calls.append("await"), raising=False
    )
    own = make_member(7, epoch=epoch)
    decision = {"crew": "this", "epoch": 4, "guests": [], "members": [own.describe()]}
    monkeypatch.setattr(membership, "ask", lambda *args, **more: calls.append("ask") or decision)
    for _ in range(2):
        made._ask(own, lambda _: True)
    made.lookout.ended.set()
    assert calls == (["ask"] * 2 if epoch else ["await", "ask"] * 2)


def claim(store: Any, number: int, known: set[int], *, epoch: int = 0) -> Membership:
    """Let a worker that knows some claims find an epoch."""
    made = Membership.__new__(Membership)
    made.rendezvous, made._known_begun = make_rendezvous(store), known
    made.rendezvous.memory = Memory()
    made._claim(SimpleNamespace(number=number, members=[make_member(7, epoch=epoch)]))
    return made


def test_a_run_is_claimed_by_one_group_of_new_workers() -> None:
    store = make_store()
    assert claim(store, 3, {0}).rendezvous.memory.claimed == {3}
    claim(store, 3, {0})  # another member
    with pytest.raises(FormingError, match="have begun the run, with epoch 3"):
        claim(store, 5, {0})
    assert read_begun(store) == 3
    claim(store, 5, {0, 3})  # the epoch was not formed, or the run has died
    assert read_begun(store) == 5
    claim(store, 6, {0}, epoch=5)  # members go on, whoever began
    assert read_begun(store) == 5


def test_survivors_follow_their_epoch_once_more_in_the_next_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store()
    made, before = Membership.__new__(Membership), make_epoch(store, 0, 1)
    made.rendezvous, made._previous, made.min_workers = make_rendezvous(store), before, 2
    made.patience, made._others_until_s = Patience(60), 0.0
    made.lookout = SimpleNamespace(pause=lambda: False)  # type: ignore[assignment]
    followed: list[Epoch] = []

    def follow_late(rendezvous: Any, epoch: Epoch, own: Member, *args: Any, **more: Any) -> Epoch:
        followed.append(epoch)
        if len(followed) == 1:
            raise dist.DistNetworkError("the store is away")
        return epoch

    monkeypatch.setattr(membership, "follow", follow_late)
    find = partial(made._find_next, before.members[0], (), patience_s=0, is_ready=lambda _: True)
    with pytest.raises(dist.DistNetworkError):
        find()
    assert find() is before
    assert followed == [before, before]
