"""Members restore an empty store: one of them, several at once, and one that dies midway."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from distlion.crew.memory import ALIVE, BEGUN, CREW, EPOCHS, GAP, IDS, NOW, Memory, read_begun
from distlion.crew.signed import SignedStore
from distlion.crew.store import TRAINED, _restore
from distlion.errors import CrewError

TOKEN = "of this crew"


def make_store(plain: Any = None) -> SignedStore:
    return SignedStore(plain or dist.HashStore(), b"of this test")  # type: ignore[attr-defined]


def make_memory(*, epoch: int = 7, ids: tuple[int, ...] = (0, 3, 4)) -> Memory:
    """Make that of a member of an epoch."""
    memory = Memory(now=f"epoch {epoch}")
    members = [{"id": identity} for identity in ids]
    memory.note_decision({"crew": TOKEN, "epoch": epoch, "members": members})
    memory.note_begun(epoch)
    return memory


def read_all(store: SignedStore) -> dict[str, Any]:
    numbers = {name: store.add(name, 0) for name in (IDS, EPOCHS)}
    crew = store.get(CREW) if store.check([CREW]) else ""
    return {**numbers, BEGUN: read_begun(store), CREW: crew}


def test_members_restore_the_numbers_beyond_all_that_were_given_and_the_token() -> None:
    store = make_store()
    make_memory().restore(store)
    assert read_all(store) == {IDS: 5 + GAP, EPOCHS: 7 + GAP, BEGUN: 7, CREW: TOKEN}
    assert store.plain.get(NOW) == b"epoch 7"


def test_members_note_in_the_next_store_too_that_a_crew_has_trained() -> None:
    plain = dist.HashStore()  # type: ignore[attr-defined]
    _restore(Memory(), b"of this test", "run", plain)
    assert not plain.check([TRAINED])
    _restore(make_memory(), b"of this test", "run", plain)
    assert plain.check([TRAINED])


def test_one_that_restores_again_or_later_changes_nothing() -> None:
    store = make_store()
    make_memory().restore(store)
    before = read_all(store)
    make_memory().restore(store)
    make_memory(epoch=6, ids=(0, 1)).restore(store)
    assert read_all(store) == before


def test_one_that_knows_of_later_numbers_raises_them_beyond_all_that_were_given() -> None:
    store = make_store()
    make_memory().restore(store)
    make_memory(epoch=300, ids=(400,)).restore(store)
    assert read_all(store) == {IDS: 401 + GAP, EPOCHS: 300 + GAP, BEGUN: 300, CREW: TOKEN}


class Interrupted:
    """A store that ends the process which writes to it, or lets another one in before that.

    Args:
        store: What keeps the values.
        n_writes: Writes that come through.
        then: What happens before the next one.
    """

    def __init__(self, store: Any, n_writes: int, then: Any) -> None:
        self._store, self._left, self._then = store, n_writes, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _write(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._then()

    def set(self, *args: Any) -> None:
        self._write()
        self._store.set(*args)

    def compare_set(self, *args: Any) -> Any:
        self._write()
        return self._store.compare_set(*args)


class KilledError(Exception):
    """Stands for the end of a process."""


def kill() -> None:
    raise KilledError


@pytest.mark.parametrize("n_writes", range(6))
def test_whoever_finds_the_token_can_rely_on_the_numbers(n_writes: int) -> None:
    plain = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(KilledError):
        make_memory().restore(make_store(Interrupted(plain, n_writes, kill)))
    found = read_all(make_store(plain))
    # Who finds anything of it waits for more signs.
    assert make_store(plain).check([ALIVE]) == (n_writes > 0)
    restored = {IDS: 5 + GAP, EPOCHS: 7 + GAP, BEGUN: 7, CREW: TOKEN}
    assert not found[CREW] or found == restored
    make_memory().restore(make_store(plain))
    assert read_all(make_store(plain)) == restored


@pytest.mark.parametrize("n_writes", range(6))
def test_several_that_restore_at_once_leave_what_one_does(n_writes: int) -> None:
    plain = dist.HashStore()  # type: ignore[attr-defined]
    other = make_store(plain)
    interrupted = Interrupted(plain, n_writes, lambda: make_memory().restore(other))
    make_memory().restore(make_store(interrupted))
    assert interrupted._left < 0
    assert read_all(other) == {IDS: 5 + GAP, EPOCHS: 7 + GAP, BEGUN: 7, CREW: TOKEN}


@pytest.mark.parametrize("n_writes", [0, 4])
def test_another_crew_in_the_store_is_an_error_and_keeps_its_token(n_writes: int) -> None:
    plain = dist.HashStore()  # type: ignore[attr-defined]
    other = make_store(plain)
    interrupted = Interrupted(plain, n_writes, lambda: other.set(CREW, "of another crew"))
    with pytest.raises(CrewError, match="have begun another run in it"):
        make_memory().restore(make_store(interrupted))
    with pytest.raises(CrewError, match="have begun another run in it"):
        make_memory().restore(other)
    assert other.get(CREW) == "of another crew"


def test_newcomers_restore_nothing() -> None:
    store, memory = make_store(), Memory()
    memory.note_begun(7)
    memory.restore(store)
    assert not store.check([CREW]) and not store.check([EPOCHS])


def test_before_the_first_epoch_those_in_the_decision_restore_its_number() -> None:
    store, memory = make_store(), Memory()
    memory.note_decision({"crew": TOKEN, "epoch": 1, "members": [{"id": 0}, {"id": 1}]})
    memory.restore(store)
    assert read_all(store) == {IDS: 2 + GAP, EPOCHS: 1 + GAP, BEGUN: 0, CREW: TOKEN}
    assert not store.check([NOW])
    assert not store.check([ALIVE])


@pytest.mark.parametrize("claimed", [{1}, set[int]()], ids=["by it", "by others"])
def test_who_claimed_a_first_epoch_that_was_not_formed_restores_the_token(
    claimed: set[int],
) -> None:
    store, memory = make_store(), Memory(crew=TOKEN, begun=1, n_epochs=1, claimed=claimed)
    memory.restore(store)
    assert read_all(store)[CREW] == (TOKEN if claimed else "")
