"""Questions: all ranks say something, and each hears what all of them say."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from hashlib import sha256

import torch

from distlion.failures import Status, make_error, name_ranks
from distlion.wire.transport import Transport
from distlion.wire.turns import find_minority

_MAGIC = b"DLas"
_ANNOUNCED = struct.Struct("<Q32s")
_CHECKSUM = struct.Struct("<I")
ANNOUNCEMENT_BYTES = len(_MAGIC) + _CHECKSUM.size + _ANNOUNCED.size
"""Bytes that every question begins with: ranks at different questions hear of it, where messages of
different sizes can abort a process inside Gloo."""
_STRANGE = (
    "{who} asked nothing that this rank knows: it runs another version of distlion, or bytes were "
    "damaged on the way; install the same version everywhere"
)


def ask(link: Transport, said: bytes, *, step: int | None) -> list[bytes]:
    """Return what every rank says, in rank order; every rank must call it.

    1 announce what this rank says:

        magic (4 B) | CRC-32 of the rest (4 B) | length (8 B) | SHA-256 (32 B)

    2 where announcements differ, send the words, padded to the longest.

    Nothing is damaged unseen: on a single rank, damage would look like a difference, after which
    that rank alone would take another way than the others.

    Args:
        link: The ranks.
        said: The words of this rank, of any length.
        step: The step that errors name.

    Raises:
        CorruptFrameError: Bytes were damaged on the way here; the others may not know.
        PeerLostError, StepTimeoutError: A rank is gone, or did not answer in time.
    """
    # 1 announce
    own = _ANNOUNCED.pack(len(said), sha256(said).digest())
    announced = _gather(link, _MAGIC + _CHECKSUM.pack(zlib.crc32(own)) + own, step=step)
    _refuse(link, [row.startswith(_MAGIC) for row in announced], step, words=_STRANGE)
    told = [row[-_ANNOUNCED.size :] for row in announced]
    heads = [_MAGIC + _CHECKSUM.pack(zlib.crc32(each)) for each in told]
    _refuse(link, list(map(bytes.startswith, announced, heads)), step)
    if len(set(told)) == 1:
        return [said] * link.n_members

    # 2 send the words
    sums = [_ANNOUNCED.unpack(each) for each in told]
    longest = max(length for length, _ in sums)
    padded = _gather(link, said.ljust(longest, b"\0"), step=step)
    rows = [row[:length] for row, (length, _) in zip(padded, sums, strict=True)]
    intact = [sha256(row).digest() == digest for row, (_, digest) in zip(rows, sums, strict=True)]
    _refuse(link, intact, step)
    return rows


def _gather(link: Transport, row: bytes, *, step: int | None) -> list[bytes]:
    # A clone: Gloo's thread releases it last, and could not free Python's memory at exit.
    own = torch.frombuffer(bytearray(row), dtype=torch.uint8).clone()
    everybody = link.empty(link.n_members, len(row))
    link.all_gather(everybody, own, step=step).wait()
    return [bytes(each.numpy()) for each in everybody]


def _refuse(
    link: Transport, intact: Sequence[bool], step: int | None, words: str | None = None
) -> None:
    culprits = [link.ranks[member] for member, is_intact in enumerate(intact) if not is_intact]
    if culprits:
        rank = link.ranks[link.rank]
        raise make_error(Status.CORRUPT, rank=rank, step=step, culprits=culprits, words=words)


def ask_texts(link: Transport, said: str, *, step: int | None) -> list[str]:
    """Do the same as ``ask`` with text."""
    rows = ask(link, said.encode(errors="backslashreplace"), step=step)
    return [row.decode() for row in rows]


def find_problem(texts: Sequence[str]) -> tuple[list[int], str]:
    """Return the ranks that have a problem, and the first one's; "" stands for none."""
    culprits = [rank for rank, text in enumerate(texts) if text]
    return culprits, texts[culprits[0]] if culprits else ""


def find_difference(texts: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
    """Find the first difference between descriptions, one from each rank.

    Args:
        texts: Lines of the form "key: value". Lines of one key are compared, wherever they stand:
            workers at different calls describe different things.

    Returns:
        The difference, and the ranks that differ from the majority; None for no difference.
    """
    said = [_by_key(text) for text in texts]
    for key in dict.fromkeys(key for one in said for key in one):
        values = [one.get(key) for one in said]
        if len(set(values)) > 1:
            return name_holders(values), find_minority(dict(enumerate(values)))
    return None


def _by_key(text: str) -> dict[str, str]:
    """Map the text before the colon to the line, or to several lines joined by commas."""
    said: dict[str, str] = {}
    for line in filter(None, text.split("\n")):
        key = line.split(": ", 1)[0]
        said[key] = f"{said[key]}, {line}" if key in said else line
    return said


def name_holders(values: Sequence[str | None]) -> str:
    """Name the ranks that hold each value: "lr: 0.1 on ranks 0, 2, but lr: 0.2 on rank 1".

    Ranks without a value come last: "lr: 0.1 on rank 1, but not on ranks 0, 2".
    """
    holders: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    without = holders.pop(None, None)
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items()]
    return ", but ".join(parts if without is None else [*parts, f"not on {name_ranks(without)}"])
