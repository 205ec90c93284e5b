"""What all workers found out together, as an exception or a log line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from distlion.errors import (
    ConfigMismatchError,
    CorruptFrameError,
    DistlionError,
    GradientChangedError,
    NonFiniteError,
    SparseGradientError,
    StepError,
    StepMismatchError,
)
from distlion.exchange import Status, Verdict
from distlion.voting.gradients import describe_sparse
from distlion.voting.handshake import name_ranks
from distlion.voting.param import VotingParam

logger = logging.getLogger("distlion")

NOT_COMMITTED = "nothing was committed"


def raise_verdict(
    params: Sequence[VotingParam], verdict: Verdict, *, rank: int, step: int
) -> NoReturn:
    """Raise the error that a verdict stands for; ``params`` are all trainable ones."""
    error, message = _find_error(verdict, params)
    raise error(
        message,
        rank=rank,
        step=step,
        culprits=verdict.culprits,
        # What concerns gradients only leaves all workers where they were, and they know it.
        is_recoverable=verdict.status < Status.CONFIG,
    )


def _find_error(verdict: Verdict, params: Sequence[VotingParam]) -> tuple[type[StepError], str]:
    """Find the class of the error, and what it says."""
    who = name_ranks(verdict.culprits) if verdict.culprits else "a worker"
    concerns_param = verdict.status < Status.INPUT
    name = name_param(params, verdict.position if concerns_param else -1)
    steps = ", ".join(f"rank {rank}: step {step}" for rank, step in verdict.steps)
    errors: dict[Status, tuple[type[StepError], str]] = {
        Status.NON_FINITE: (
            NonFiniteError,
            f"gradient, direction or new momentum of {name} is not finite on {who}; "
            f"{NOT_COMMITTED}. nonfinite='skip' drops such a step on all workers (what a "
            "GradScaler needs), 'abstain' only that worker's votes",
        ),
        Status.SPARSE_GRADIENT: (
            SparseGradientError,
            f"on {who}: {describe_sparse(name)}; {NOT_COMMITTED}",
        ),
        Status.GRADIENT_CHANGED: (
            GradientChangedError,
            f"the gradient of {name} changed on {who} after it was encoded; {NOT_COMMITTED}. "
            "Change gradients (clip, unscale) before step(), and with overlap not at all. With "
            "overlap put all backward passes but the last one inside no_sync(), and checkpoint "
            "layers that share parameters with use_reentrant=False",
        ),
        Status.SETTINGS_CHANGED: (
            GradientChangedError,
            f"lr, betas, weight_decay, cautious or aggregation changed on {who} between the first "
            f"vote, which left during backward, and step(); {NOT_COMMITTED}. With overlap call "
            "schedulers after step()",
        ),
        Status.CANCELLED: (
            StepMismatchError,
            f"{who} gave this step up, by zero_grad() between backward and step(), and other "
            f"workers did not; {NOT_COMMITTED}. Skip a step on all workers, or use "
            "nonfinite='skip'",
        ),
        Status.CONFIG: (ConfigMismatchError, f"settings differ on {who}; {NOT_COMMITTED}"),
        # A call of step() that one rank left out does not show here: numbers count committed steps,
        # so that it takes part one batch later, and is missed at the end, by a timeout.
        Status.STEP: (
            StepMismatchError,
            f"workers are at different steps ({steps}); {NOT_COMMITTED}. Did a worker load "
            "another checkpoint, or leave out a step that the others committed?",
        ),
        Status.CORRUPT: (
            CorruptFrameError,
            f"bytes from {who} were damaged on the way; {NOT_COMMITTED}",
        ),
    }
    return errors[verdict.status]


def describe_problem(error: Exception) -> str:
    """Say what an exception says, and its class where it is none of ours."""
    return str(error) if isinstance(error, DistlionError) else f"{type(error).__name__}: {error}"


def name_param(params: Sequence[VotingParam], position: int) -> str:
    """Name a parameter; -1 stands for none in particular."""
    return params[position].name if position >= 0 else "some parameter"


def log_skip(params: Sequence[VotingParam], verdict: Verdict, *, rank: int, step: int) -> None:
    """Say that all workers drop this step."""
    logger.warning(
        "[rank %d, step %d] all workers skip this step: %s is not finite on %s",
        rank,
        step,
        name_param(params, verdict.position),
        name_ranks(verdict.culprits),
    )


def log_abstention(names: Sequence[str], *, rank: int, step: int) -> None:
    """Say that this worker does not vote for some parameters."""
    logger.warning("[rank %d, step %d] abstains, not finite: %s", rank, step, ", ".join(names))
