"""The log and the counts of members that leave a crew and join it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist

import distlion
from crews import host_store
from distlion.crew.changes import Changes
from distlion.crew.epoch import Epoch, Member
from distlion.crew.signed import SignedStore
from distlion.errors import CrewError, PeerLostError, StepTimeoutError

STORE = SignedStore(dist.HashStore(), b"of this test")  # type: ignore[attr-defined]


def make_epoch(number: int, *members: tuple[int, int], own: int) -> Epoch:
    """Make an epoch of members, given as their ids and the last epochs that they were whole in."""
    made = tuple(Member(each, epoch, 7 * number, 1, "host", 100 + each) for each, epoch in members)
    place = [member.id for member in made].index(own)
    return Epoch(number, made, place, STORE.at(f"epoch {number}"))


FIRST = ((0, 0), (1, 0), (2, 0), (3, 0))


def test_each_member_that_is_missing_has_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distlion")
    changes, other = Changes(), Changes()
    first = make_epoch(1, *FIRST, own=0)
    changes.note_epoch(first, seconds=2.5)
    other.note_epoch(make_epoch(1, *FIRST, own=3), seconds=2.5)
    changes.note_loss(StepTimeoutError("", culprits=(1,)), first)
    changes.note_loss(PeerLostError("", culprits=(3,)), first)
    other.say_goodbye(ValueError("bad\n" + 300 * "x"))
    changes.note_epoch(make_epoch(2, (0, 1), (5, 0), own=0), seconds=0.25)
    said = caplog.messages[-1]
    assert said.startswith("epoch 2 formed in 0.25 s: 2 workers, at step 14, rank 0 here; left: ")
    reasons = said.split("; ")[1]
    assert reasons.startswith(
        "left: worker 1 (silent), worker 2 (did not come to this epoch), "
        "worker 3 (left by itself, ValueError: bad xxx"
    )
    assert len(reasons) < 300
    assert said.endswith("; came: worker 5 (new)")
    counted = changes.counted
    assert (counted.epoch, counted.members, counted.epochs_formed) == (2, 2, 2)
    assert (counted.members_lost, counted.forming_s) == (3, 2.75)


def test_a_worker_that_was_given_up_sees_itself_come_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distlion")
    changes = Changes()
    changes.note_epoch(make_epoch(11, *FIRST, own=3), seconds=1)
    changes.note_epoch(make_epoch(13, (0, 12), (1, 12), (2, 12), (3, 11), own=3), seconds=1)
    assert caplog.messages[-1].endswith("left: nobody; came: worker 3 (back)")
    assert changes.counted.members_lost == 0


def test_reasons_of_one_epoch_are_forgotten_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distlion")
    changes = Changes()
    first = make_epoch(21, *FIRST, own=0)
    changes.note_epoch(first, seconds=1)
    changes.note_loss(PeerLostError("", culprits=(1,)), first)
    changes.note_epoch(make_epoch(22, (0, 21), (1, 21), (2, 21), (3, 21), own=0), seconds=1)
    changes.note_epoch(make_epoch(23, (0, 22), (2, 22), (3, 22), own=0), seconds=1)
    assert "left: worker 1 (did not come to this epoch); " in caplog.messages[-1]


def test_an_error_of_the_crew_is_not_told_to_a_store_that_may_be_gone() -> None:
    changes = Changes()
    changes.say_goodbye(ValueError())  # there is nobody yet who would read it
    changes.note_epoch(make_epoch(31, *FIRST, own=0), seconds=1)
    changes.say_goodbye(CrewError("the store is gone"))
    assert not STORE.check(["epoch 31/goodbye/0"])
    changes.say_goodbye(ValueError())
    assert STORE.check(["epoch 31/goodbye/0"])


def test_a_store_that_is_gone_keeps_nobody_from_the_next_epoch() -> None:
    changes, store = Changes(), host_store()
    ends = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    changes.note_epoch(dataclasses.replace(make_epoch(41, *FIRST, own=0), store=ends), seconds=1)
    del store
    changes.note_epoch(make_epoch(42, (0, 41), (1, 41), own=0), seconds=1)
    changes.say_goodbye(ValueError())
    assert changes.counted.members_lost == 2


def test_traffic_without_a_crew_has_no_members() -> None:
    optimizer = distlion.DistributedLion([torch.nn.Parameter(torch.zeros(3))], lr=1e-3)
    assert not hasattr(optimizer.traffic, "members")
    assert not hasattr(optimizer.traffic, "epoch")
