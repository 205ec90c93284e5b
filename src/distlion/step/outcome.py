"""Verdicts as exceptions and log lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.amp.grad_scaler import GradScaler

from distlion.errors import DistlionError, StepError
from distlion.exchange import Verdict
from distlion.failures import Status, make_error, name_ranks
from distlion.step.param import VotingParam

logger = logging.getLogger("distlion")


def explain(
    verdict: Verdict, params: Sequence[VotingParam], problem: str = "", *, rank: int, step: int
) -> StepError:
    """Return the error that a verdict stands for.

    Args:
        verdict: What all ranks found.
        params: All trainable parameters.
        problem: With ``Status.INPUT`` what keeps a rank from voting, in words.
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
    """Say what an exception says, and its class where it is none of ours."""
    return str(error) if isinstance(error, DistlionError) else f"{type(error).__name__}: {error}"


def name_param(params: Sequence[VotingParam], position: int) -> str:
    """Name a parameter; -1 stands for none in particular."""
    return params[position].name if 0 <= position < len(params) else "some parameter"


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


def note_overflow() -> None:
    """Let the GradScaler whose ``step()`` is under way find an overflow, if there is one.

    Its ``update()`` reads only what it found among this worker's gradients. Where another worker's
    overflow makes all of them drop a step, it would keep its scale while that one halves its own:
    scales part, every worker tries larger ones in a step of its own, and all of them lose each.

    Notes:
        torch gives an optimizer no way to the scaler but an argument of ``step()`` that it warns
        of, so that it is looked up among the callers. What it found lies in a private attribute,
        there since GradScaler exists; tests hold both.
    """
    frame = sys._getframe()
    while frame.f_code is not GradScaler.step.__code__:
        if frame.f_back is None:
            return
        frame = frame.f_back
    scaler: GradScaler = frame.f_locals["self"]
    if not scaler.is_enabled():
        return
    # Of this optimizer alone: others of the same scaler may have their step still before them.
    state = scaler._per_optimizer_states[id(frame.f_locals["optimizer"])]
    for found_inf in state["found_inf_per_device"].values():
        found_inf.fill_(1.0)
