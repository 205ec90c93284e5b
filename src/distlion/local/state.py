"""The state of local steps beside the inner optimizer's: saved, checked, loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError
from distlion.local.inner_optimizers import check_owners
from distlion.local.votes import LocalVotes, Progress
from distlion.optim.base import read_state
from distlion.optim.saved_state import reading_state, restoring
from distlion.step.shard_pieces import ShardPieces

LOCAL_KEY = "local_steps"
"""Key of the state dict, beside "state" and "param_groups"; also of each saved group."""

_BESIDE = "kept beside the groups"
"""Value in each saved group: it shows whether the state has lost the rest."""

CALL = "load_state_dict()"


def export_progress(progress: Progress, every: int) -> dict[str, Any]:
    """Return the saved form of a worker's place between votes."""
    # A list, as in earlier versions, which had one number for each part of the parameters.
    return {
        "every": every,
        "local_step": progress.calls,
        "steps_since_vote": [progress.since],
    }


def drop_marks(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return saved groups as the inner optimizer loads them."""
    return [{key: group[key] for key in group if key != LOCAL_KEY} for group in groups]


def export_local_state(inner_state: dict[str, Any], votes: LocalVotes) -> dict[str, Any]:
    """Return the inner optimizer's state, and beside it all else except the parameters.

    Args:
        inner_state: The inner optimizer's state dict.
        votes: The votes on its deltas.

    Raises:
        CheckpointError: An exception cut the commit of a vote short.
    """
    common = votes.common
    own = {
        **export_progress(votes.progress, votes.every),
        "common": votes.pairs.common,
        "outer_momentum": [each.detach() for each in votes.stage.momentum.buffers],
        "votes": common.state_dict(),
    }
    groups = [{**group, LOCAL_KEY: _BESIDE} for group in inner_state["param_groups"]]
    return {**inner_state, "param_groups": groups, LOCAL_KEY: own}


def list_marks(state_dict: Mapping[str, Any]) -> list[Any]:
    """List the values by which saved groups show that ``LocalSteps`` saved them."""
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list | tuple):
        return []
    return [
        group[LOCAL_KEY] for group in groups if isinstance(group, Mapping) and LOCAL_KEY in group
    ]


def load_local_state(
    inner: Optimizer, votes: LocalVotes, state_dict: Mapping[str, Any]
) -> Progress | None:
    """Load the result of ``export_local_state`` and the inner optimizer's state, on all ranks.

    Args:
        inner: The optimizer that takes the local steps.
        votes: The votes on its deltas.
        state_dict: The inner optimizer's state, and perhaps the rest.

    Returns:
        This worker's place between votes; None where the state is the inner optimizer's only.

    Raises:
        CheckpointError: It does not fit, on some rank, or ranks have states of different steps; on
            every rank, and nothing was changed.
    """
    problem, own, said, progress = None, None, "a state without local steps", None
    common = votes.common
    with restoring(inner):
        try:
            with reading_state():
                own = _find_own(state_dict, inner, votes)
                check_owners(inner, state_dict["param_groups"])
                if own is not None:
                    progress = _parse(own, votes)
                    said = progress.describe()
                beside = {key: state_dict[key] for key in state_dict if key != LOCAL_KEY}
                groups = drop_marks(state_dict["param_groups"])
                inner.load_state_dict({**beside, "param_groups": groups})
        except CheckpointError as error:
            problem = error
        votes.agree(CALL, problem, said)
        # All ranks make the same calls, also where one of them has a state without the rest.
        common.load_state_dict(read_state(common) if own is None else own["votes"])
    if own is None:
        return None
    with torch.no_grad():
        for param, saved in zip(votes.pairs.common, own["common"], strict=True):
            param.copy_(saved)
        for buffer, saved in zip(votes.stage.momentum.buffers, own["outer_momentum"], strict=True):
            buffer.copy_(saved)
    return progress


def _find_own(
    state_dict: Mapping[str, Any], inner: Optimizer, votes: LocalVotes
) -> Mapping[str, Any] | None:
    """Return the state beside the inner optimizer's; None where another optimizer saved it.

    Raises:
        CheckpointError: It was lost, or has another form.
    """
    own: Mapping[str, Any] | None = state_dict.get(LOCAL_KEY)
    marks = list_marks(state_dict)
    if own is None and any(isinstance(mark, Mapping) for mark in marks):
        raise CheckpointError(
            "the state was saved by LocalSteps of sharded parameters, and these are whole. "
            "Expected one of whole parameters. Load it into an optimizer of DTensors"
        )
    if own is None and marks:
        raise CheckpointError(
            f"the state has lost its key {LOCAL_KEY!r}, which holds the common point, residuals "
            "and the place between votes. A function that keeps only 'state' and 'param_groups' "
            "has dropped it, such as torch's get_optimizer_state_dict. Save with "
            "distlion.save_checkpoint, or all that state_dict() returns. To begin with the inner "
            f"optimizer's state alone, remove {LOCAL_KEY!r} from the saved groups"
        )
    if votes.shard_pieces is None:
        return own
    if own is not None:
        raise CheckpointError(
            "the state was saved by LocalSteps of whole parameters, and these are DTensors. "
            "Expected one of DTensors. Load it into an optimizer of whole parameters"
        )
    _check_inner_alone(state_dict, inner, votes.shard_pieces)
    return None


def _check_inner_alone(
    state_dict: Mapping[str, Any], inner: Optimizer, pieces: ShardPieces
) -> None:
    """Check that an inner state of sharded parameters is not that of all workers."""
    for saved, group in zip(state_dict["param_groups"], inner.param_groups, strict=False):
        for key, param in zip(saved["params"], group["params"], strict=False):
            stacked = tuple(pieces.stacked_shape(param))
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and tuple(value.shape) == stacked:
                    raise CheckpointError(
                        f"{name!r} of {key!r} has the shape {stacked}, that of all workers' state, "
                        f"and the groups have lost {LOCAL_KEY!r}. Expected all that state_dict() "
                        "of LocalSteps returns. Do not remove keys from it"
                    )


def parse_progress(saved: Mapping[str, Any], every: int, what: str) -> Progress:
    """Return a worker's place between votes from ``export_progress``.

    Args:
        saved: The saved state.
        every: The optimizer's steps between votes, which must be the saved ones.
        what: Name of the saved state for errors.

    Raises:
        CheckpointError: It has another number of steps between votes, a number of steps that is
            none, or votes of earlier versions on parts of the parameters or under way.
    """
    missing = export_progress(Progress(0, 0), every).keys() - saved.keys()
    if missing:
        raise CheckpointError(
            f"{what} has no {', '.join(sorted(missing))}. Expected a state of LocalSteps. Load it "
            "with the version that saved it"
        )
    if saved.get("parts", 1) != 1 or saved.get("late_part") is not None:
        raise CheckpointError(
            f"{what} was saved with parts={saved.get('parts', 1)}, or while a vote with delay= was "
            "under way. LocalSteps no longer has parts= and delay=. Load it with the version that "
            "saved it, call vote(), and begin here with the model's weights"
        )
    if saved["every"] != every:
        raise CheckpointError(
            f"{what} votes every {saved['every']} steps, and this optimizer every "
            f"{every}. Expected the same. Make it with the saved number"
        )
    calls, since = saved["local_step"], saved["steps_since_vote"]
    if not _is_number(calls):
        raise CheckpointError(f"local_step is {calls!r}; expected a number of steps, 0 or more")
    if not isinstance(since, list | tuple) or len(since) != 1 or not _is_number(since[0]):
        raise CheckpointError(
            f"steps_since_vote is {since!r}; expected a list of one number of steps, 0 or more"
        )
    return Progress(calls, since[0])


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0


def check_shapes(name: str, saved: Sequence[Tensor], present: Sequence[Tensor]) -> None:
    """Check that saved tensors have the shapes of the present ones.

    Raises:
        CheckpointError: They do not.
    """
    found, expected = ([tuple(each.shape) for each in tensors] for tensors in (saved, present))
    if found != expected:
        raise CheckpointError(
            f"{name} was saved with the shapes {found[:4]}, {len(found)} in all, and this "
            f"optimizer has {expected[:4]}, {len(expected)} in all. Expected the same parameters, "
            "and the same outer step"
        )


def _parse(own: Mapping[str, Any], votes: LocalVotes) -> Progress:
    """Check that all of a worker's state fits, and return its place between votes."""
    progress = parse_progress(own, votes.every, "the saved state")
    check_shapes("common", own["common"], votes.pairs.common)
    check_shapes("outer_momentum", own["outer_momentum"], votes.stage.momentum.buffers)
    return progress
