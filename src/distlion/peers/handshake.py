"""The handshake: workers compare settings, layout and versions before they trust each other."""

from __future__ import annotations

from collections.abc import Sequence

from distlion.errors import CheckpointError, ConfigMismatchError
from distlion.failures import Status, make_error, name_ranks
from distlion.peers.fingerprint import digest_lines
from distlion.wire.frame import PROTOCOL_VERSION
from distlion.wire.transport import Transport, gather_bytes
from distlion.wire.verdict import Verdict, minority

CALL = "call: "

PROBLEM_BYTES = 1024
"""Most bytes of a message that are sent, so that records have one size."""


_OWN = slice(4, 8)
"""The bytes of a record with the worker's weight, which may differ between workers."""


def shake_hands(link: Transport, lines: Sequence[str], *, step: int, weight: int = 0) -> list[int]:
    """Compare this worker's description of parameters and settings with all others.

    Records of a fixed size are compared first, since tensors whose sizes differ between ranks can
    abort a process inside the network library. Only if they differ are the descriptions themselves
    sent. A record is

        protocol version (4 B) | weight (4 B) | bytes of the description (8 B) | its digest (32 B)

    Args:
        link: All ranks.
        lines: Lines that must be equal on all of them.
        step: The step that errors name.
        weight: This worker's weight, as ``encode_weight`` returns it; it may differ.

    Returns:
        The weights in all ranks' records, in rank order.

    Raises:
        ConfigMismatchError: On every rank; names the first line that differs, and the ranks.
        PeerLostError: A worker has left since.
    """
    text = "\n".join(lines).encode()
    record = (
        PROTOCOL_VERSION.to_bytes(4, "little")
        + weight.to_bytes(4, "little")
        + len(text).to_bytes(8, "little")
        + digest_lines(lines)
    )
    records = gather_bytes(link, record, step=step)
    if len({each[: _OWN.start] + each[_OWN.stop :] for each in records}) > 1:
        longest = max(int.from_bytes(other[8:16], "little") for other in records)
        raise_difference(link, lines, longest, step=step)
    # A worker may have sent its record and then been interrupted while it waited.
    link.check_present(step=step)
    return [int.from_bytes(each[_OWN], "little") for each in records]


def explain_verdict(
    link: Transport, verdict: Verdict, lines: Sequence[str], problem: str, *, step: int
) -> None:
    """Raise details that do not fit into a header; every rank calls it after a failed exchange.

    Args:
        link: The link between all ranks.
        verdict: The verdict of all ranks.
        lines: Lines that must be equal on all of them.
        problem: Reason why this rank cannot vote; "" for none.
        step: The step that was abandoned.

    Raises:
        StepInputError: Some rank cannot vote.
        ConfigMismatchError: Settings differ.
    """
    if verdict.status is Status.INPUT:
        culprits, said = gather_problems(link, problem, step=step)
        raise make_error(verdict.status, rank=link.rank, step=step, culprits=culprits, problem=said)
    if verdict.status is Status.CONFIG:
        if not any(line.startswith(CALL) for line in lines):
            lines = [f"{CALL}step()", *lines]
        explain_difference(link, lines, step=step)


def explain_difference(link: Transport, lines: Sequence[str], *, step: int) -> None:
    """Find the difference after frames have shown that there is one; every rank calls it.

    Raises:
        ConfigMismatchError: Always.
    """
    length = len("\n".join(lines).encode())
    lengths = gather_bytes(link, length.to_bytes(8, "little"), step=step)
    raise_difference(
        link, lines, max(int.from_bytes(other, "little") for other in lengths), step=step
    )


def raise_difference(link: Transport, lines: Sequence[str], longest: int, *, step: int) -> None:
    """Gather all descriptions, padded to ``longest`` bytes, and raise the first difference."""
    padded = "\n".join(lines).encode().ljust(longest, b"\0")
    texts = [other.rstrip(b"\0").decode() for other in gather_bytes(link, padded, step=step)]
    found = find_difference([text.split("\n") for text in texts])
    if found is not None:
        what, culprits = found
        raise ConfigMismatchError(
            f"workers disagree: {what}; {_advise(what, texts)}",
            rank=link.rank,
            step=step,
            culprits=culprits,
        )
    raise ConfigMismatchError(
        "workers run different protocol versions; install the same distlion everywhere",
        rank=link.rank,
        step=step,
    )


def _advise(what: str, texts: Sequence[str]) -> str:
    """Return advice: make the calls that some rank left out, or give all the same settings."""
    if not what.startswith(CALL):
        return "give every worker the same parameters, settings, version and calls"
    lines = dict.fromkeys(line for text in texts for line in text.split("\n"))
    calls = [line.removeprefix(CALL) for line in lines if line.startswith(CALL)]
    listed = " and ".join(call for call in calls if call != "step()")
    return f"{listed} must be called by every rank, after the same step"


def find_difference(descriptions: Sequence[Sequence[str]]) -> tuple[str, tuple[int, ...]] | None:
    """Find the first difference between descriptions, one from each rank.

    Args:
        descriptions: Lines of the form "key: value". Lines of one key are compared, wherever they
            stand: workers at different calls describe different things.

    Returns:
        The difference, and the ranks that differ from the majority; None for no difference.
    """
    said = [_by_key(lines) for lines in descriptions]
    for key in dict.fromkeys(key for one in said for key in one):
        values = [one.get(key) for one in said]
        if len(set(values)) > 1:
            return _name_holders(values), minority(values)
    return None


def _by_key(lines: Sequence[str]) -> dict[str, str]:
    """Map the text before the colon to the line, or to several lines joined by commas."""
    said: dict[str, str] = {}
    for line in lines:
        key = line.split(": ", 1)[0]
        said[key] = f"{said[key]}, {line}" if key in said else line
    return said


def _name_holders(values: Sequence[str | None]) -> str:
    """Name the ranks that hold each value: "lr: 0.1 on ranks 0, 2, but lr: 0.2 on rank 1".

    Ranks without a value come last: "lr: 0.1 on rank 1, but not on ranks 0, 2".
    """
    holders: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    without = holders.pop(None, None)
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items()]
    return ", but ".join(parts if without is None else [*parts, f"not on {name_ranks(without)}"])


def share_problem(
    link: Transport, problem: CheckpointError | None, *, call: str, step: int
) -> None:
    """Raise on every rank if any of them cannot go on.

    Raises:
        CheckpointError: Some rank has a problem; names the ranks and the first one's problem.
    """
    culprits, said = gather_problems(link, "" if problem is None else str(problem), step=step)
    if culprits:
        error = CheckpointError(
            f"[rank {link.rank}, step {step}] {call} was refused on {name_ranks(culprits)}, and "
            f"nothing was changed anywhere: {said}"
        )
        error.is_recoverable = True
        raise error from problem


def share_said(link: Transport, said: str, *, call: str, step: int) -> None:
    """Compare a line about the coming call between all ranks.

    Args:
        link: The link between all ranks.
        said: A line of up to ``PROBLEM_BYTES``.
        call: The call that they are at.
        step: The step that errors name.

    Raises:
        CheckpointError: The lines differ; the same on every rank, and all can go on.
    """
    _, texts = _gather_texts(link, said, step=step)
    if len(set(texts)) > 1:
        error = CheckpointError(
            f"[rank {link.rank}, step {step}] {call} was refused, and nothing was changed "
            f"anywhere: workers differ ({_name_holders(texts)}). Expected the same on all. Make "
            "the same calls on all of them, and load what was saved together"
        )
        error.is_recoverable = True
        raise error


def gather_problems(link: Transport, problem: str, *, step: int) -> tuple[list[int], str]:
    """Return the ranks that have a problem, and the first one's problem."""
    culprits, said = _gather_texts(link, problem, step=step)
    return culprits, said[culprits[0]] if culprits else ""


def _gather_texts(link: Transport, text: str, *, step: int) -> tuple[list[int], list[str]]:
    """Return the ranks with a text, and the texts of all."""
    own = text.encode(errors="replace")[:PROBLEM_BYTES]
    gathered = gather_bytes(link, own.ljust(PROBLEM_BYTES, b"\0"), step=step)
    said = [each.rstrip(b"\0").decode(errors="replace") for each in gathered]
    return [rank for rank, each in enumerate(said) if each], said
