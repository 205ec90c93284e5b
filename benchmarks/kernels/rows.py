"""What the table says: the groups that are measured in turn, their rows and the targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from contestants import (
    BITS,
    COUNTING_SHARE,
    SMALL_ELEMENTS,
    SMALL_TENSORS,
    WORKERS,
    Contestants,
    Data,
    build_checks,
    build_counting,
    build_counts,
    build_levels,
    build_masks,
    build_packing,
    build_small,
    build_steps,
)


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: What it says.
        over: The contestants whose seconds, added up, are divided ...
        under: ... by those of these, added up. Empty: the row is a rate in GB/s of ``over``.
        target: What the ratio should be at most, or None.
        at_least: Whether it should be at least that.
        bytes_each: For a rate, bytes for each parameter.
    """

    name: str
    over: tuple[str, ...]
    under: tuple[str, ...] = ()
    target: float | None = None
    at_least: bool = False
    bytes_each: float = 0.0


class Group(NamedTuple):
    """Contestants that take turns, and the rows that come of their times.

    Attributes:
        title: Heading of the rows.
        build: Makes the contestants.
        rows: The rows.
        cold: Whether the caches are emptied before each call.
    """

    title: str
    build: Callable[[Data], Contestants]
    rows: tuple[Row, ...]
    cold: bool = False


OTHERS = ("eager", "eager as published", "eager by lerp", "foreach", "compiled", "lion-pytorch")
STEP = ("encode_signs", "commit")
STEP_TARGETS = {
    "eager": 0.23,
    "eager as published": 0.23,
    "compiled": 1.0,
    "lion-pytorch": 0.15,
}
ALONE_TARGETS = {"lion-pytorch": 0.12}


def against_others(name: str, over: tuple[str, ...], targets: dict[str, float]) -> list[Row]:
    return [Row(f"{name} / {other}", over, (other,), targets.get(other)) for other in OTHERS]


STREAMING_ROWS = (
    Row("streaming loop / encode_signs", ("stream_encode",), ("encode_signs",), 0.85, True),
    Row("streaming loop / commit", ("stream_commit",), ("commit",), 0.85, True),
    Row("streaming loop / step_alone", ("stream_step",), ("step_alone",), 0.85, True),
    Row("streaming loop of encode_signs, GB/s", ("stream_encode",), bytes_each=8.125),
    Row("streaming loop of commit, GB/s", ("stream_commit",), bytes_each=20.125),
    Row("streaming loop of step_alone, GB/s", ("stream_step",), bytes_each=20.0),
)
LION_ROWS = (
    *against_others("encode_signs + commit", STEP, STEP_TARGETS),
    Row("encode_signs + commit / compiled in two passes", STEP, ("compiled in two passes",), 1.0),
    *against_others("step_alone", ("step_alone",), ALONE_TARGETS),
    # No method of two passes, and none of one pass, can be faster than these.
    *against_others("both streaming loops", ("stream_encode", "stream_commit"), {}),
    *against_others("streaming loop of step_alone", ("stream_step",), {}),
)
COUNT_ROWS = (
    *(Row(f"count_signs, N = {n} / step", (f"count_signs N={n}",), STEP, 0.04) for n in WORKERS),
    *(Row(f"count_ones, N = {n} / step", (f"count_ones N={n}",), STEP, 0.15) for n in WORKERS),
    *(
        Row(f"count_levels, p = {p}, N = {n} / step", (f"count_levels p={p} N={n}",), STEP, 0.15)
        for p in BITS
        for n in WORKERS
    ),
    Row("count_signs, N = 4, whole bucket / step", ("count_signs N=4 whole",), STEP),
)
LEVEL_ROWS = tuple(
    Row(f"encode_levels, l1, p = {p} / encode_signs", (f"encode_levels p={p}",), STEP[:1], 2.0)
    for p in BITS
)
MASK_ROWS = (
    *(
        Row(f"{op}, cautious / {op}", (f"{op} cautious",), (op,), 1.02)
        for op in ("encode_signs", "encode_ternary")
    ),
    Row("encode_pairs / encode_ternary", ("encode_pairs",), ("encode_ternary",), 1.02),
    *(
        Row(
            f"count_pairs, one bit down, N = {n} / count_ternary",
            (f"count_pairs N={n}",),
            (f"count_ternary N={n}",),
        )
        for n in WORKERS
    ),
)
SMALL_ROWS = (
    Row(
        f"encode_signs of {SMALL_TENSORS} x {SMALL_ELEMENTS:,} / of one tensor",
        ("many small",),
        ("one of their size",),
        1.5,
    ),
    # Addresses and hyperparameters are read once a step, for encode and commit.
    Row("gather of the 300 / encode_signs of one tensor", ("gather many",), ("one of their size",)),
)
PACKING_ROWS = (
    Row("encode_signs / packbits of ready booleans", STEP[:1], ("packbits",)),
    Row("encode_signs / lerp, > 0 and packbits", STEP[:1], ("direction and packbits",)),
)
COUNTING_ROWS = (
    Row("count_signs, N = 8 / torch.mode of unpacked votes", ("count_signs N=8",), ("torch.mode",)),
    Row("count_signs, N = 8 / unpackbits and sum", ("count_signs N=8",), ("unpack and sum",)),
)
CHECK_ROWS = (
    Row("frame / copy and zlib.crc32", ("frame",), ("copy and zlib.crc32",)),
    Row("frame, GB/s", ("frame",), bytes_each=0.125),
    Row("copy and zlib.crc32, GB/s", ("copy and zlib.crc32",), bytes_each=0.125),
    Row("digest, GB/s", ("digest",), bytes_each=4.0),
)

# Groups that share contestants are measured by themselves, so that a ratio is of near times.
GROUPS = (
    Group("Lion and the streaming rate", build_steps, (*STREAMING_ROWS, *LION_ROWS)),
    Group("Levels", build_levels, LEVEL_ROWS),
    Group("Masks", build_masks, MASK_ROWS),
    Group(
        "Counting one owner's shard; step = encode_signs + commit", build_counts, COUNT_ROWS, True
    ),
    Group("Small tensors", build_small, SMALL_ROWS),
    Group("Packing", build_packing, PACKING_ROWS),
    Group(f"Majority of 1/{COUNTING_SHARE} of the parameters", build_counting, COUNTING_ROWS),
    Group("Checks", build_checks, CHECK_ROWS),
)
