"""Damaged files of every format, in processes of their own: read, or refused with a typed error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster import run_workers
from formats.campaign import FORMATS, prepare_process, run

QUICK = 50
ALL = 100_000
CHUNK = 12_500
# The limit of a worker: a file that is read without an end is one that died.
SECONDS_PER_FILE = 0.3


def fuzz(rank: int, world_size: int, names: list[str], first: int, count: int) -> list[Any]:
    prepare_process()
    return [run(name, first, count) for name in names[rank::world_size]]


def assert_only_typed(rows: list[dict[str, Any]], count: int) -> None:
    for row in rows:
        assert row["untyped"] == 0, row
        assert row["read"] + row["refused"] == count
        # Damage that leaves nothing to read, or nothing to refuse, tries nothing.
        assert row["read"] > count / 50, row


def test_a_few_damaged_files_of_each_format_are_read_or_refused() -> None:
    timeout_s = 60 + SECONDS_PER_FILE * QUICK * len(FORMATS)
    found = run_workers(fuzz, 2, list(FORMATS), 0, QUICK, timeout_s=timeout_s, process_group=False)
    rows = [row for part in found for row in part]
    assert sorted(row["format"] for row in rows) == sorted(FORMATS)
    assert_only_typed(rows, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_all_damaged_files_of_a_format_are_read_or_refused(name: str) -> None:
    timeout_s = 60 + SECONDS_PER_FILE * CHUNK

    def work(first: int) -> dict[str, Any]:
        ((row,),) = run_workers(
            fuzz, 1, [name], first, CHUNK, timeout_s=timeout_s, process_group=False, measured=False
        )
        return row

    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(work, range(0, ALL, CHUNK)))
    assert_only_typed(rows, CHUNK)
