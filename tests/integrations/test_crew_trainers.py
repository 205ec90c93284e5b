"""Trainers of frameworks are members of a crew."""

from __future__ import annotations

import pytest

from cluster import WorkerDiedError
from crews import host_store, start
from integrations.crew_jobs import (
    CALLED_AT,
    COME_BY,
    GOAL,
    MEMBERS,
    Train,
    be_member,
    train_with_accelerate,
    train_with_lightning,
    train_with_trainer,
)


@pytest.mark.parametrize("train", [train_with_trainer, train_with_lightning, train_with_accelerate])
def test_a_member_is_killed_and_a_newcomer_comes(train: Train, tmp_path: object) -> None:
    store = host_store()
    dead, *lived = start(be_member, MEMBERS, store.port, train, str(tmp_path), may_die=True)
    assert isinstance(dead, WorkerDiedError)
    *stayed, new = lived
    for each in stayed:
        assert sorted(each["digests"]) == list(range(1, GOAL + 1))  # a step for each batch
    assert CALLED_AT < new["first"] <= COME_BY + 1
    assert sorted(new["digests"]) == list(range(new["first"], GOAL + 1))
    for step in range(1, GOAL + 1):
        assert len({each["digests"][step] for each in lived if step in each["digests"]}) == 1
    assert {each["counted"] for each in lived} == {GOAL}
    assert len({each["rate"] for each in lived}) == 1
