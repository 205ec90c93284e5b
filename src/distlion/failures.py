"""One table of failures: the error class and message of each status or failed transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from distlion.errors import (
    ConfigMismatchError,
    CorruptFrameError,
    EpochOverError,
    GradientChangedError,
    NonFiniteError,
    PeerLostError,
    SparseGradientError,
    StepError,
    StepInputError,
    StepMismatchError,
    StepTimeoutError,
)


class Status(IntEnum):
    """The state of a step that a header reports; of several, the highest counts."""

    OK = 0
    EPOCH_OVER = 1
    NON_FINITE = 2
    OVERFLOW = 3
    SPARSE_GRADIENT = 4
    GRADIENT_CHANGED = 5
    INPUT = 6
    SETTINGS_CHANGED = 7
    CANCELLED = 8
    CONFIG = 9
    STEP = 10
    CORRUPT = 11


FailureKind = Literal["lost", "silent", "order", "call", "left"]
"""The failure of a transfer: a connection closed, a deadline passed, workers are at calls of
different optimizers or at different calls of one, or a worker said that it leaves."""


SPARSE_WORDS = (
    "{name} has a sparse gradient; every element is voted on, so build the embedding with "
    "sparse=False"
)


class Failure(NamedTuple):
    """The error that a failure becomes.

    Attributes:
        error: Its class.
        words: Its message, with names of details in braces.
        is_recoverable: Whether all workers know that nothing was committed anywhere, so that the
            optimizer can go on: true for all errors in the inputs of one step.
    """

    error: type[StepError]
    words: str
    is_recoverable: bool = False


# None of them shows that one rank skipped a call of step(): numbers count committed steps, so it #
# takes part one batch later, and the others time out at the end.
FAILURES: Mapping[Status | FailureKind | Literal["busy"], Failure] = {
    Status.EPOCH_OVER: Failure(
        EpochOverError,
        "{who} has seen that members of the crew change; nothing was committed",
        is_recoverable=True,
    ),
    Status.NON_FINITE: Failure(
        NonFiniteError,
        "gradient, direction or new momentum of {name} is not finite on {who}; nothing was "
        "committed. nonfinite='skip' drops such a step on all workers, 'abstain' only that "
        "worker's votes",
        is_recoverable=True,
    ),
    # An optimizer with a GradScaler skips the step instead; callers without a policy raise.
    Status.OVERFLOW: Failure(
        NonFiniteError,
        "the GradScaler of {who} saw an overflow; nothing was committed",
        is_recoverable=True,
    ),
    Status.SPARSE_GRADIENT: Failure(
        SparseGradientError,
        f"on {{who}}: {SPARSE_WORDS}; nothing was committed",
        is_recoverable=True,
    ),
    Status.GRADIENT_CHANGED: Failure(
        GradientChangedError,
        "the gradient of {name} changed on {who} after it was encoded; nothing was committed. "
        "Change gradients (clip, unscale) before step(), and with overlap not at all. With overlap "
        "put all backward passes but the last one inside no_sync(), and checkpoint layers that "
        "share parameters with use_reentrant=False",
        is_recoverable=True,
    ),
    Status.INPUT: Failure(
        StepInputError,
        "nothing was committed, because {who} cannot vote: {problem}",
        is_recoverable=True,
    ),
    Status.SETTINGS_CHANGED: Failure(
        GradientChangedError,
        "lr, betas, weight_decay, cautious or aggregation changed on {who} between the first "
        "vote, which left during backward, and step(); nothing was committed. With overlap call "
        "schedulers after step()",
        is_recoverable=True,
    ),
    Status.CANCELLED: Failure(
        StepMismatchError,
        "{who} gave this step up, by zero_grad() between backward and step(), and other workers "
        "did not; nothing was committed. Skip a step on all workers, or use nonfinite='skip'",
        is_recoverable=True,
    ),
    Status.CONFIG: Failure(ConfigMismatchError, "settings differ on {who}; nothing was committed"),
    Status.STEP: Failure(
        StepMismatchError,
        "workers are at different steps ({steps}); nothing was committed. Did a worker load "
        "another checkpoint, or leave out a step that the others committed?",
    ),
    Status.CORRUPT: Failure(
        CorruptFrameError, "bytes from {who} were damaged on the way; nothing was committed here"
    ),
    "lost": Failure(
        PeerLostError,
        "{what}: {who} is gone; look at its log, or, if it ended normally, for fewer batches or a "
        "skipped step() there{note}; nothing was committed here",
    ),
    "left": Failure(
        PeerLostError,
        "{what}: {who} left, and is no longer waited for; look at its log, or, if it ended "
        "normally, for fewer batches or a skipped step() there{note}; nothing was committed here",
    ),
    "silent": Failure(
        StepTimeoutError,
        "{what}: {who} does not answer; is the process stopped, its machine or network down, or "
        "did it not make this call? {limits}{note}; nothing was committed here",
    ),
    "busy": Failure(
        StepTimeoutError,
        "{what}: {who} runs, but did not come to the exchange; is it slower than the limit, or "
        "has it left the training loop? {limits}{note}; nothing was committed here",
    ),
    "order": Failure(
        StepMismatchError,
        "workers called their optimizers in different orders: {calls}; every worker must make the "
        "same calls of all its optimizers, in the same order; nothing was committed here",
    ),
    "call": Failure(
        ConfigMismatchError,
        "workers disagree: {calls}, after the same step; nothing was committed here",
    ),
}
"""The error for each status in a header and each failure of a transfer."""

GIVEN_UP = (
    "{what}: the other workers waited for this one for too long, and gave it up; nothing was "
    "committed here"
)
"""The message of a failed transfer on the rank that the others blame for it."""


def make_error(
    seen: Status | FailureKind | Literal["busy"],
    *,
    rank: int = 0,
    step: int | None = None,
    culprits: Sequence[int] = (),
    words: str | None = None,
    **details: Any,
) -> StepError:
    """Make the error that a failure becomes.

    Args:
        seen: The failure.
        rank: This rank.
        step: The step that was abandoned; None for an optimizer that does not count.
        culprits: Ranks that caused it.
        words: Message that replaces the table's; None for the table's.
        **details: Details in the message; ``who`` defaults to the names of ``culprits``.
    """
    failure = FAILURES[seen]
    details.setdefault("who", name_ranks(culprits) if culprits else "a worker")
    return failure.error(
        (words or failure.words).format(**details),
        rank=rank,
        step=step,
        culprits=tuple(culprits),
        is_recoverable=failure.is_recoverable,
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a message: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
