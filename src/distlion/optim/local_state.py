"""The state of local steps beside that of the inner optimizer: saved, checked, loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError
from distlion.optim.common_point import CommonPoint
from distlion.optim.saved_state import reading_state, restoring

LOCAL_KEY = "local_steps"
"""Of the state dict, beside "state" and "param_groups"."""

CALL = "load_state_dict()"


def export_local_state(
    votes: CommonPoint,
    common: Sequence[Tensor],
    *,
    calls: int,
    since_vote: int,
    every: int,
    begun: Sequence[Tensor] | None,
) -> dict[str, Any]:
    """Return all that the inner optimizer's state does not hold, but for the parameters.

    Args:
        votes: The optimizer of the common point.
        common: The common point.
        calls: Calls of ``step()`` so far.
        since_vote: Those since the last vote.
        every: Calls from one vote to the next.
        begun: Where this worker was when the vote began whose outcome is still to be taken.

    Raises:
        CheckpointError: An exception cut the commit of a vote short.
    """
    return {
        "every": every,
        "local_step": calls,
        "steps_since_vote": since_vote,
        "begun": None if begun is None else list(begun),
        "common": [each.detach() for each in common],
        "outer_momentum": [each.detach() for each in votes.outer_momentum.buffers],
        "votes": votes.state_dict(),
    }


def load_local_state(
    inner: Optimizer,
    votes: CommonPoint,
    common: Sequence[Tensor],
    state_dict: Mapping[str, Any],
    *,
    every: int,
) -> Mapping[str, Any] | None:
    """Load what ``export_local_state`` returned, and the inner optimizer's state; all ranks do.

    Args:
        inner: The optimizer that takes the local steps.
        votes: The optimizer of the common point.
        common: The common point.
        state_dict: The inner optimizer's state, and perhaps the rest.
        every: Calls from one vote to the next.

    Returns:
        What ``export_local_state`` returned; None where the state holds the inner optimizer's only.

    Raises:
        CheckpointError: It does not fit, on some rank, or ranks have states of different steps; on
            every rank, and nothing was changed.
    """
    problem, own, said = None, None, "a state without local steps"
    with restoring(inner):
        try:
            with reading_state():
                own = state_dict.get(LOCAL_KEY)
                if own is not None:
                    _check(own, votes, common, every=every)
                    said = describe_progress(
                        own["local_step"], own["steps_since_vote"], is_late=own["begun"] is not None
                    )
                inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        except CheckpointError as error:
            problem = error
        votes.agree(CALL, problem, said)
        # The same calls on all ranks, also where one of them has a state without the rest.
        votes.load_state_dict(votes.state_dict() if own is None else own["votes"])
    if own is None:
        return None
    with torch.no_grad():
        for param, saved in zip(common, own["common"], strict=True):
            param.copy_(saved)
        for buffer, saved in zip(votes.outer_momentum.buffers, own["outer_momentum"], strict=True):
            buffer.copy_(saved)
    checked: Mapping[str, Any] = own
    return checked


def describe_progress(calls: int, since_vote: int, *, is_late: bool) -> str:
    """Say where in its period a worker is; it must be equal on all workers."""
    late = ", and an outcome to be taken" if is_late else ""
    return f"{calls} steps, {since_vote} of them since the last vote{late}"


def _check(
    own: Mapping[str, Any], votes: CommonPoint, common: Sequence[Tensor], *, every: int
) -> None:
    if own["every"] != every:
        raise CheckpointError(
            f"the saved state votes every {own['every']} steps, and this optimizer every {every}. "
            "Expected the same. Make it with the saved number"
        )
    for name in ("local_step", "steps_since_vote"):
        if type(own[name]) is not int or own[name] < 0:
            raise CheckpointError(f"{name} is {own[name]!r}; expected a number of steps, 0 or more")
    expected = {"common": common, "outer_momentum": votes.outer_momentum.buffers}
    if own["begun"] is not None:
        expected["begun"] = common
    for name, present in expected.items():
        shapes = [tuple(each.shape) for each in present]
        saved = [tuple(each.shape) for each in own[name]]
        if saved != shapes:
            raise CheckpointError(
                f"{name} was saved with the shapes {saved[:4]}, {len(saved)} in all, and this "
                f"optimizer has {shapes[:4]}, {len(shapes)} in all. Expected the same parameters, "
                "and the same outer step"
            )
