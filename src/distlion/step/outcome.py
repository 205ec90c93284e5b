"""Verdicts as exceptions and log lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from distlion.errors import DistlionError, StepError
from distlion.failures import Status, make_error, name_ranks
from distlion.step.param import VotingParam
from distlion.wire.verdict import Verdict

logger = logging.getLogger("distlion")


def explain(
    verdict: Verdict, params: Sequence[VotingParam], problem: str = "", *, rank: int, step: int
) -> StepError:
    """Return the error that a verdict stands for.

    Args:
        verdict: The verdict of all ranks.
        params: All trainable parameters.
        problem: With ``Status.INPUT`` the reason why a rank cannot vote.
        rank: This rank.
        step: The step that was abandoned.
    """
    concerns_param = verdict.status < Status.INPUT
    return make_error(
        verdict.status,
        rank=rank,
        step=step,
        culprits=verdict.culprits,
        name=name_param(params, verdict.position if concerns_param else -1),
        problem=problem,
        steps=", ".join(f"rank {number}: step {there}" for number, there in verdict.steps),
    )


def describe_problem(error: Exception) -> str:
    """Return an exception's message, with its class unless it is distlion's."""
    return str(error) if isinstance(error, DistlionError) else f"{type(error).__name__}: {error}"


def name_param(params: Sequence[VotingParam], position: int) -> str:
    """Name a parameter by position; -1 stands for none in particular."""
    return params[position].name if 0 <= position < len(params) else "some parameter"


def log_skip(params: Sequence[VotingParam], verdict: Verdict, *, rank: int, step: int) -> None:
    """Log that all workers skip this step; an overflow is part of a GradScaler's search."""
    has_overflow = verdict.status is Status.OVERFLOW
    logger.log(
        logging.INFO if has_overflow else logging.WARNING,
        "[rank %d, step %d] all workers skip this step: %s on %s",
        rank,
        step,
        "a GradScaler saw an overflow"
        if has_overflow
        else f"{name_param(params, verdict.position)} is not finite",
        name_ranks(verdict.culprits),
    )


def log_abstention(names: Sequence[str], *, rank: int, step: int) -> None:
    """Log that this worker does not vote for some parameters."""
    logger.warning("[rank %d, step %d] abstains, not finite: %s", rank, step, ", ".join(names))


def note_overflow() -> None:
    """Report an overflow to the GradScaler whose ``step()`` is under way, if there is one.

    Its ``update()`` reads only the overflows of this worker's gradients. If another worker's
    overflow makes all of them skip a step, it would keep its scale while that worker halves its
    own. Scales would diverge, every worker would try larger ones in a different step, and all would
    lose each of these steps.

    Notes:
        Its finding lies in a private attribute that has existed as long as GradScaler.
    """
    stepping = find_scaler()
    if stepping is None:
        return
    # For this optimizer only: others of the same scaler may not have done their step yet.
    scaler, optimizer = stepping
    state = scaler._per_optimizer_states[id(optimizer)]
    for found_inf in state["found_inf_per_device"].values():
        found_inf.fill_(1.0)


def find_scaler() -> tuple[GradScaler, Optimizer] | None:
    """Find the enabled GradScaler whose ``step()`` is under way, and its optimizer.

    Notes:
        torch gives an optimizer no access to the scaler except a deprecated argument of ``step()``,
        so it is looked up among the callers.
    """
    frame = sys._getframe()
    while frame.f_code is not GradScaler.step.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    scaler: GradScaler = frame.f_locals["self"]
    return (scaler, frame.f_locals["optimizer"]) if scaler.is_enabled() else None
