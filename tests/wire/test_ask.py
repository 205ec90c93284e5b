"""A question to all ranks: what each hears, how much travels, and what becomes of damage."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from distlion.errors import CorruptFrameError
from distlion.wire.ask import ANNOUNCEMENT_BYTES, ask, ask_texts, find_difference, find_problem

LIMIT_S = 10.0


@dataclass
class Table:
    """The place where all ranks of one process lay down their rows."""

    n: int
    damage: Callable[[int, int, bytes], bytes] = lambda round_, reader, row: row
    sizes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.n, timeout=LIMIT_S)
        self.rows: dict[int, Tensor] = {}
        self.sizes = [[] for _ in range(self.n)]


class Seat:
    """One rank's link."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.n_members = table, rank, table.n
        self.ranks = tuple(10 + member for member in range(table.n))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def all_gather(self, out: Tensor, chunk: Tensor, *, step: int | None) -> Seat:
        table, number = self.table, len(self.table.sizes[self.rank])
        table.rows[self.rank] = chunk.clone()
        table.sizes[self.rank].append(chunk.numel())
        table.barrier.wait()
        for member, row in table.rows.items():
            read = bytes(row.numpy())
            if member == 1:
                read = table.damage(number, self.rank, read)
            out[member] = torch.frombuffer(bytearray(read), dtype=torch.uint8)
        table.barrier.wait()
        return self

    def wait(self) -> None: ...


def ask_all(said: list[bytes], table: Table | None = None) -> tuple[list[Any], Table]:
    """Let each rank say something; return what each hears, or its error."""
    table = table or Table(len(said))

    def speak(rank: int) -> Any:
        try:
            return ask(Seat(table, rank), said[rank], step=3)  # type: ignore[arg-type]
        except CorruptFrameError as error:
            return error

    with ThreadPoolExecutor(len(said)) as pool:
        return list(pool.map(speak, range(len(said)))), table


def test_ranks_that_say_the_same_send_an_announcement_only() -> None:
    heard, table = ask_all([b"x" * 5000] * 3)
    assert heard == [[b"x" * 5000] * 3] * 3
    assert table.sizes == [[ANNOUNCEMENT_BYTES]] * 3


@pytest.mark.parametrize(
    "said", [[b"", b"a"], [b"ab\0\0", b"ab", b"ab"], [b"a" * 70_000, b"", b"b"]]
)
def test_words_of_any_length_are_heard_by_all(said: list[bytes]) -> None:
    heard, table = ask_all(said)
    assert heard == [said] * len(said)
    assert table.sizes == [[ANNOUNCEMENT_BYTES, max(map(len, said))]] * len(said)


@pytest.mark.parametrize("at", range(ANNOUNCEMENT_BYTES))
def test_a_damaged_announcement_is_an_error_on_the_rank_that_reads_it(at: int) -> None:
    def damage(round_: int, reader: int, row: bytes) -> bytes:
        hits = reader == 0 and round_ == 0
        return row[:at] + bytes([row[at] ^ 4]) + row[at + 1 :] if hits else row

    heard, _ = ask_all([b"same"] * 3, Table(3, damage))
    assert isinstance(heard[0], CorruptFrameError)
    assert heard[0].culprits == (11,) and heard[0].step == 3 and not heard[0].is_recoverable
    assert ("another version" in str(heard[0])) is (at < 4)
    assert heard[1:] == [[b"same"] * 3] * 2


def test_damaged_words_are_an_error_on_the_rank_that_reads_them() -> None:
    def damage(round_: int, reader: int, row: bytes) -> bytes:
        return b"?" + row[1:] if round_ == 1 and reader == 2 else row

    heard, _ = ask_all([b"one", b"two", b"three"], Table(3, damage))
    assert heard[:2] == [[b"one", b"two", b"three"]] * 2
    assert isinstance(heard[2], CorruptFrameError) and heard[2].culprits == (11,)


def test_the_announcement_has_the_size_of_every_version_before() -> None:
    assert ANNOUNCEMENT_BYTES == 48 and struct.calcsize("<4sIQ32s") == 48


def test_texts_travel_even_if_no_file_system_could_write_them() -> None:
    table = Table(2)
    with ThreadPoolExecutor(2) as pool:
        heard = list(
            pool.map(
                lambda rank: ask_texts(Seat(table, rank), ["a\udc80", ""][rank], step=None),  # type: ignore[arg-type]
                range(2),
            )
        )
    assert heard == [["a\\udc80", ""]] * 2


def test_the_first_problem_is_told_with_all_ranks_that_have_one() -> None:
    assert find_problem(["", "no disk", "", "no memory"]) == ([1, 3], "no disk")
    assert find_problem(["", ""]) == ([], "")


def test_the_minority_is_named() -> None:
    assert find_difference(["a: 1", "a: 2", "a: 1"]) == (
        "a: 1 on ranks 0, 2, but a: 2 on rank 1",
        (1,),
    )
    assert find_difference(["a: 1", "a: 1"]) is None
