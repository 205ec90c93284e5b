"""The verdict of an exchange: the worst error in its chunks, and the ranks to blame."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from distlion.failures import Status
from distlion.layout import pad_bytes
from distlion.wire.frame import Chunks, Header
from distlion.wire.turns import find_minority

_LENGTHS = struct.Struct("<II")
_CULPRIT = struct.Struct("<i")
_STEP = struct.Struct("<iq")


@dataclass(frozen=True)
class Verdict:
    """The joint finding of an exchange's headers; equal on ranks that read the same headers.

    Attributes:
        status: The worst finding.
        culprits: Ranks to blame, among all workers; empty where that is unknown.
        position: Number of the parameter concerned, among the trainable ones; -1 for none.
        cancelled_by_all: With CANCELLED, whether every worker gave the step up.
        ends_epoch: With OK, whether the epoch ends with this step.
        steps: Rank and step of every worker that was heard.
    """

    status: Status
    culprits: tuple[int, ...] = ()
    position: int = -1
    cancelled_by_all: bool = False
    ends_epoch: bool = False
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, header: Header) -> Verdict:
        """Make a verdict of one header, as at the end of an exchange."""
        if header.status is Status.OK:
            return cls(Status.OK, ends_epoch=header.ends_epoch)
        culprits = (header.culprit,) if header.culprit >= 0 else ()
        return cls(header.status, culprits, header.position, header.cancelled_by_all)


def with_error(
    header: Header,
    status: Status,
    *,
    culprit: int,
    position: int = -1,
    cancelled_by_all: bool = False,
) -> Header:
    """Put an error into a header, unless it holds a graver or earlier one."""
    if status <= header.status:
        return header
    return replace(
        header,
        status=status,
        culprit=culprit,
        position=position,
        cancelled_by_all=cancelled_by_all,
    )


def with_error_of(header: Header, other: Header) -> Header:
    """Put another header's error into a header, as ``with_error`` does."""
    return with_error(
        header,
        other.status,
        culprit=other.culprit,
        position=other.position,
        cancelled_by_all=other.cancelled_by_all,
    )


def with_verdict(header: Header, verdict: Verdict) -> Header:
    """Put a verdict into a header, which holds the first culprit only."""
    return replace(
        header,
        status=verdict.status,
        culprit=verdict.culprits[0] if verdict.culprits else -1,
        position=verdict.position,
        cancelled_by_all=verdict.cancelled_by_all,
        ends_epoch=verdict.ends_epoch,
    )


def encode_verdict(verdict: Verdict, n_bytes: int) -> Tensor:
    """Write as a payload what does not fit into a header: all culprits and all steps.

        number of culprits (4 B), of steps (4 B) | culprits (4 B each) | rank (4 B), step (8 B) each

    Args:
        verdict: Names each member of a link at most once as a culprit, and once with its step.
        n_bytes: Bytes of the payload, padded with 0. A reply has 64 for every member, which takes
            16 here, and 8 in all. 0 where a bucket has no elements: only the header tells then.

    Returns:
        (n_bytes,) uint8 on the CPU.
    """
    if not n_bytes:
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    packed = _LENGTHS.pack(len(verdict.culprits), len(verdict.steps))
    packed += b"".join(_CULPRIT.pack(culprit) for culprit in verdict.culprits)
    packed += b"".join(_STEP.pack(rank, step) for rank, step in verdict.steps)
    return torch.frombuffer(bytearray(packed.ljust(n_bytes, b"\0")), dtype=torch.uint8)


def verdict_bytes(n_named: int) -> int:
    """Return the bytes of a payload for ``n_named`` culprits and as many steps."""
    return pad_bytes(_LENGTHS.size + n_named * (_CULPRIT.size + _STEP.size))


def decode_verdict(header: Header, payload: Tensor) -> Verdict:
    """Read the verdict in a chunk made by ``with_verdict`` and ``encode_verdict``.

    Args:
        header: Its header; without an error, the payload holds something else.
        payload: (n_bytes,) uint8.
    """
    if header.status is Status.OK or not payload.numel():
        return Verdict.of(header)
    packed = payload.cpu().numpy().tobytes()
    n_culprits, n_steps = _LENGTHS.unpack_from(packed)
    middle = _LENGTHS.size + n_culprits * _CULPRIT.size
    end = middle + n_steps * _STEP.size
    culprits = tuple(rank for (rank,) in _CULPRIT.iter_unpack(packed[_LENGTHS.size : middle]))
    steps = tuple((rank, step) for rank, step in _STEP.iter_unpack(packed[middle:end]))
    return replace(Verdict.of(header), culprits=culprits, steps=steps)


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Join verdicts: the first of the gravest, with the culprits and steps of all equal ones."""
    worst = max(verdicts, key=attrgetter("status"))
    if worst.status is Status.OK:
        return max(verdicts, key=attrgetter("ends_epoch"))
    alike = [verdict for verdict in verdicts if verdict.status == worst.status]
    return replace(
        worst,
        culprits=tuple(sorted({rank for verdict in alike for rank in verdict.culprits})),
        cancelled_by_all=all(verdict.cancelled_by_all for verdict in alike),
        steps=tuple(sorted({pair for verdict in alike for pair in verdict.steps})),
    )


def find_errors(chunks: Chunks, own: Header, ranks: Sequence[int]) -> Header:
    """Put the worst error in the received chunks, one from each of ``ranks``, into a header."""
    if chunks.agree:  # this rank's own chunk is one of them
        return own.amended(ends_epoch=chunks.ends_epoch)
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
            own = with_error_of(own, chunk.header)
    if own.status is Status.CANCELLED:
        by_all = all(chunk is not None and chunk.header.cancelled_by_all for chunk in chunks)
        own = replace(own, cancelled_by_all=by_all)
    return own


def judge_chunks(chunks: Chunks, ranks: Sequence[int]) -> Verdict:
    """Judge one chunk from each member of a link; ``ranks`` are the members' ranks."""
    if chunks.agree:
        return Verdict(Status.OK, ends_epoch=chunks.ends_epoch)
    lost = chunks.find_lost(ranks)
    if lost:
        return Verdict(Status.CORRUPT, lost)
    return judge([chunk.header for chunk in chunks if chunk is not None], ranks)


def judge(headers: Sequence[Header], ranks: Sequence[int]) -> Verdict:
    """Judge one header from each member of a link; ``ranks`` are the members' ranks."""
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
    return Verdict(
        worst,
        tuple(culprit for culprit in culprits if culprit >= 0),  # -1: unknown to the finder
        position=first.position if first else -1,
        cancelled_by_all=all(header.cancelled_by_all for header in headers),
        steps=steps,
    )


def minority(values: Sequence[object]) -> tuple[int, ...]:
    """Find the ranks whose value differs from the majority's; none without a majority."""
    return find_minority(dict(enumerate(values)))
