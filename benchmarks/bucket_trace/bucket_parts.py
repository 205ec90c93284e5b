"""The instants of a bucket on a rank, and the parts of a step between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import NamedTuple

INSTANTS = (
    *("begun", "encoded", "framed", "sent"),
    *("arrived", "woken", "checked", "counted"),
    *("reply_framed", "reply_sent", "reply_arrived", "reply_woken", "reply_checked"),
    *("committed", "ended"),
)
"""The instants of a step on a rank, each the end of a part.

``arrived`` is when the kernel had the last byte of the votes for which this rank is the owner,
``woken`` when the thread that waited went on; ``reply_arrived`` and ``reply_woken`` are those of
the replies of all owners."""
LATER, ON_THE_WAY, WAKE_UP = "others are later", "bytes on the way", "wake up"
FRAMES, SEND = "write and check frames", "send"
ENCODE, COUNT, COMMIT, REST = "load and encode", "count", "judge and commit", "the rest of step()"
PARTS = (ENCODE, FRAMES, SEND, LATER, ON_THE_WAY, WAKE_UP, COUNT, COMMIT, REST)
Step = Sequence[Sequence[float]]
"""The ``INSTANTS`` of each rank, microseconds of one clock."""


class Span(NamedTuple):
    """A part of a step on a rank, in microseconds."""

    part: str
    begin: float
    end: float


def list_spans(step: Step, rank: int) -> Iterator[Span]:
    """Yield the parts of a step on a rank, one after the other, from its begin to its end."""
    at = dict(zip(INSTANTS, step[rank], strict=True))
    yield Span(ENCODE, at["begun"], at["encoded"])
    yield Span(FRAMES, at["encoded"], at["framed"])
    yield Span(SEND, at["framed"], at["sent"])
    yield from _list_waits(step, rank, "")
    yield Span(FRAMES, at["woken"], at["checked"])
    yield Span(COUNT, at["checked"], at["counted"])
    yield Span(FRAMES, at["counted"], at["reply_framed"])
    yield Span(SEND, at["reply_framed"], at["reply_sent"])
    yield from _list_waits(step, rank, "reply_")
    yield Span(FRAMES, at["reply_woken"], at["reply_checked"])
    yield Span(COMMIT, at["reply_checked"], at["committed"])
    yield Span(REST, at["committed"], at["ended"])


def _list_waits(step: Step, rank: int, what: str) -> Iterator[Span]:
    """Yield the parts of a wait: until all have sent, all has arrived, and it has ended.

    Args:
        step: The step.
        rank: The rank that waits.
        what: Prefix of the instants, for votes or replies.
    """
    sent, arrived, woken = (
        INSTANTS.index(f"{what}{name}") for name in ("sent", "arrived", "woken")
    )
    own = step[rank]
    # Bytes may come before the call that sends them has returned, and before this rank waits.
    here = min(max(own[arrived], own[sent]), own[woken])
    all_sent = min(max(each[sent] for each in step), here)
    yield Span(LATER, own[sent], all_sent)
    yield Span(ON_THE_WAY, all_sent, here)
    yield Span(WAKE_UP, here, own[woken])


def find_length(step: Step) -> float:
    """Return the length of a step on the rank where it takes longest."""
    return max(instants[-1] - instants[0] for instants in step)


def find_median_step(steps: Sequence[Step]) -> Step:
    """Return the step of median length."""
    return sorted(steps, key=find_length)[len(steps) // 2]


def sum_parts(step: Step) -> dict[str, float]:
    """Return the length of each part, mean over ranks."""
    totals = {
        part: [
            sum(span.end - span.begin for span in list_spans(step, rank) if span.part == part)
            for rank in range(len(step))
        ]
        for part in PARTS
    }
    return {part: mean(each) for part, each in totals.items()}


def find_medians(steps: Sequence[Step]) -> dict[str, float]:
    """Return the length of each part, mean over ranks and median over steps."""
    each = [sum_parts(step) for step in steps]
    return {part: median(parts[part] for parts in each) for part in PARTS}
