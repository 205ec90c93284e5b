"""What the chunks of an exchange say together: the worst that was found, and who is to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distlion.exchange.frame import BY_ALL, BY_SOME, Chunks, Header, Status


def with_error(header: Header, status: Status, *, culprit: int, detail: int = -1) -> Header:
    """Put an error into a header, unless it holds a graver one, or one that was found earlier."""
    if status <= header.status:
        return header
    return replace(header, status=status, culprit=culprit, detail=detail)


def find_errors(chunks: Chunks, own: Header, ranks: Sequence[int]) -> Header:
    """Put the worst of what was received, one chunk from each of ``ranks``, into a header."""
    if chunks.agree_on(own.step, own.settings):
        return own
    for lost in chunks.find_lost(ranks):
        own = with_error(own, Status.CORRUPT, culprit=lost)
    for status, name, mine in (
        (Status.STEP, "step", own.step),
        (Status.CONFIG, "settings", own.settings),
    ):
        values = chunks.fields[name].tolist()
        others = [member for member, value in enumerate(values) if value != mine]
        if others:
            own = with_error(own, status, culprit=ranks[(*minority(values), *others)[0]])
    for chunk in chunks:
        if chunk is not None:
            theirs = chunk.header
            own = with_error(own, theirs.status, culprit=theirs.culprit, detail=theirs.detail)
    if own.status is Status.CANCELLED:
        by_all = all(chunk is not None and _is_cancelled_by_all(chunk.header) for chunk in chunks)
        own = replace(own, detail=BY_ALL if by_all else BY_SOME)
    return own


def _is_cancelled_by_all(header: Header) -> bool:
    return header.status is Status.CANCELLED and header.detail == BY_ALL


@dataclass(frozen=True)
class Verdict:
    """What the headers of an exchange say together; equal on ranks that read the same headers.

    Attributes:
        status: The worst finding.
        culprits: Ranks to blame, among all workers; empty where that cannot be told.
        detail: The parameter concerned, as its position among trainable ones; -1 for none in
            particular; with CANCELLED, ``BY_ALL`` or ``BY_SOME``.
        steps: Rank and step of everybody who was heard.
    """

    status: Status
    culprits: tuple[int, ...] = ()
    detail: int = -1
    steps: tuple[tuple[int, int], ...] = ()


def judge_chunks(chunks: Chunks, ranks: Sequence[int]) -> Verdict:
    """Draw the verdict out of one chunk from each member of a link, whose ``ranks`` are given."""
    first = chunks.fields[0]
    if chunks.agree_on(first["step"], first["settings"]):
        return Verdict(Status.OK)
    lost = chunks.find_lost(ranks)
    if lost:
        return Verdict(Status.CORRUPT, lost)
    return judge([chunk.header for chunk in chunks if chunk is not None], ranks)


def judge(headers: Sequence[Header], ranks: Sequence[int]) -> Verdict:
    """Draw the verdict out of one header from each member of a link, whose ``ranks`` are given."""
    worst = max(header.status for header in headers)
    steps = tuple(zip(ranks, (header.step for header in headers), strict=True))
    for status, values in (
        (Status.STEP, [header.step for header in headers]),
        (Status.CONFIG, [header.settings for header in headers]),
    ):
        if worst < Status.CORRUPT and len(set(values)) > 1:
            culprits = tuple(ranks[member] for member in minority(values))
            return Verdict(status, culprits, steps=steps)
    blamed = [header for header in headers if header.status == worst and worst]
    culprits = tuple(sorted({header.culprit for header in blamed}))
    first = next((header for header in blamed if header.culprit == culprits[0]), None)
    detail = first.detail if first else -1
    if worst is Status.CANCELLED:
        detail = BY_ALL if all(map(_is_cancelled_by_all, headers)) else BY_SOME
    return Verdict(worst, culprits, detail, steps)


def minority(values: Sequence[object]) -> tuple[int, ...]:
    """Find the ranks that differ from more than half of all; none without such a majority."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return ()
    return tuple(rank for rank, other in enumerate(values) if other != value)
