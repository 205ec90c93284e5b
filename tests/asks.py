"""Workers that ask, and a rendezvous that has nothing but their store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from distlion.crew import admission, lookout
from distlion.crew.admission import Ask, ask
from distlion.crew.epoch import Epoch, Member
from distlion.crew.lanes import OneLane
from distlion.crew.membership import decide_among
from distlion.crew.memory import Memory
from distlion.crew.signed import SignedStore

SETTINGS = 17


def make_store(secret: bytes = b"of this test", plain: Any = None) -> SignedStore:
    return SignedStore(plain or dist.HashStore(), secret)  # type: ignore[attr-defined]


def make_member(identity: int, *, settings: int = SETTINGS, epoch: int = 3) -> Member:
    return Member(identity, epoch, 40, settings, "host", 100 + identity)


def make_epoch(store: Any, *ids: int) -> Epoch:
    members = tuple(make_member(each) for each in ids)
    return Epoch(3, members, 0, store.at("epoch 3"))


def make_rendezvous(store: Any, places: int = 9) -> Any:
    return SimpleNamespace(
        store=store,
        count_places=lambda n_members: places - n_members,
        find_last_begun=lambda: 3,
        say_alive=lambda word: None,
        has_signs=False,
        is_somebody_alive=lambda: False,
        check_secret=lambda: None,
        check_open=lambda: None,
        pulse=SimpleNamespace(is_led=True),
        is_away=False,
        trouble=None,
        memory=Memory(),
        name_crew=lambda: "the crew of this test",
        find_grace_s=lambda: 0.0,
        few="fewer than 2 workers came",
    )


def ask_of(rendezvous: Any, member: Member, *, limit_s: float = 60) -> dict[str, Any]:
    decide = partial(decide_among, rendezvous, min_workers=2)
    return ask(rendezvous, member, min_workers=2, limit_s=limit_s, decide=decide)


def ask_together(rendezvous: Any, *members: Member) -> list[dict[str, Any]]:
    """Let workers ask at the same time; return their answers."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(partial(ask_of, rendezvous), members))


def make_lookout(store: Any, places: int = 9) -> lookout.Lookout:
    """Make one whose thread has nothing to look at."""
    return lookout.Lookout(make_rendezvous(store, places), 0, OneLane())


def put_ask(store: Any, number: int, member: Member, *, is_ready: bool) -> Ask:
    made = Ask(number, member)
    admission._change(store, lambda asks: [*asks, made])
    if is_ready:
        store.set(made.ready, "0 0")
    return made
