"""Failed groups are kept while something is under way on them, and not much longer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from distlion.wire import gloo, groups
from distlion.wire.gloo import let_go_of_failed
from distlion.wire.groups import keep


class Group:
    """In the place of a process group."""


@dataclass(eq=False)
class Transfer:
    process_group: Group
    is_completed: bool


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Group, Transfer]]:
    """Return a group that failed, and a transfer that is under way on it."""
    monkeypatch.setattr(groups, "_kept", {})
    monkeypatch.setattr(gloo, "_under_way", set())
    group = Group()
    transfer = Transfer(group, is_completed=False)
    gloo._under_way.add(transfer)  # type: ignore[arg-type]
    keep(group)
    return group, transfer


def is_freed_after(failed: tuple[Group, Transfer], *, since_s: float) -> bool:
    left = weakref.ref(failed[0])
    let_go_of_failed(since_s=since_s, settled_since_s=0)
    return left() not in groups._kept and not gloo._under_way


def test_a_group_is_kept_while_a_transfer_is_under_way(failed: tuple[Group, Transfer]) -> None:
    assert not is_freed_after(failed, since_s=1800)


def test_a_group_is_freed_once_all_transfers_have_completed(
    failed: tuple[Group, Transfer],
) -> None:
    failed[1].is_completed = True
    assert is_freed_after(failed, since_s=1800)


def test_no_group_is_kept_for_longer_than_an_operation_may_take(
    failed: tuple[Group, Transfer],
) -> None:
    assert is_freed_after(failed, since_s=0)
