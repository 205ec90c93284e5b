"""Checks of ``load_state_dict``: it accepts fitting states of this optimizer and other Lions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError, DistlionError, OneWorkersStateWarning
from distlion.numpy_numbers import as_python
from distlion.optim.saved_groups import (
    WORKER_KEY,
    check_agreements,
    check_division,
    check_ids,
    check_steps,
    shorten,
    take_lions,
)
from distlion.step.agreement import export_agreement
from distlion.step.gradients import warn_user
from distlion.step.hyperparameters import read_step
from distlion.step.param import is_dtensor
from distlion.votes.aggregation import Aggregation
from distlion.votes.registry import list_worker_state, parse_rule
from distlion.votes.ternary import TernaryVote

if TYPE_CHECKING:
    from distlion.optim.base import LionBase


@contextmanager
def reading_state() -> Iterator[None]:
    """Turn any failure to read a saved state into a CheckpointError, which others then hear of.

    Raises:
        CheckpointError: The state is malformed.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the saved state is malformed ({type(error).__name__}: {shorten(str(error))}). "
            "Expected what state_dict() of a Lion returns. Nothing was changed"
        ) from error


def warn_of_one_state(n_workers: int) -> None:
    """Warn that ``state_dict()`` holds the state of one of several workers."""
    warn_user(
        f"state_dict() holds the momentum of one of {n_workers} workers. A run cannot be resumed "
        "from a file that rank 0 saves for all. Call distlion.save_checkpoint(path, model, "
        "optimizer) on every rank, or use the bridge to your trainer (documentation, "
        '"Your trainer"). A file for each rank, or a rollback in memory, is fine too.',
        OneWorkersStateWarning,
    )


def parse_or_note(
    parse: Callable[[], dict[str, Any]],
) -> tuple[dict[str, Any], CheckpointError | None]:
    """Return a parsed state, or the error, of which other workers have to hear before it raises."""
    try:
        return parse(), None
    except CheckpointError as error:
        return {}, error


@dataclass(frozen=True)
class _Exporter:
    """A hook of ``state_dict()`` that gives the state its saved form.

    Attributes:
        export: Function from a momentum or a rule's state to its saved form.
    """

    export: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = {
            index: {
                **entry,
                **{key: self.export(params[index], entry[key]) for key in list_kept(entry)},
            }
            for index, entry in state_dict["state"].items()
        }
        groups = [_export_group(group) for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}


def _export_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without objects of distlion's classes and of numpy's.

    torch's ``weights_only`` refuses numpy's numbers, which a schedule by numpy writes as ``lr``.
    """
    group = {key: _as_plain(value) for key, value in group.items()}
    rule = group.get("aggregation")
    if not isinstance(rule, Aggregation) or "step" not in group:  # of a Lion, which reads neither
        return group
    named = {"aggregation": repr(rule), "step": read_step([group])}
    return {**group, **export_agreement(group), **named}


def _as_plain(value: Any) -> Any:
    """Return numbers of numpy as Python's, also those of betas."""
    if isinstance(value, tuple | list) and any(isinstance(each, np.generic) for each in value):
        return type(value)(as_python(each) for each in value)
    return as_python(value)


def export_first(optimizer: Optimizer, export: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make the saved form the first thing that post hooks of ``state_dict()`` do.

    Args:
        optimizer: The optimizer. A hook is registered once, and moved only if it is not the first.
        export: Function from a momentum or a rule's state to its saved form.
    """
    hooks = optimizer._optimizer_state_dict_post_hooks
    ours = [key for key, hook in hooks.items() if isinstance(hook, _Exporter)]
    if not ours:
        optimizer.register_state_dict_post_hook(_Exporter(export), prepend=True)
    elif next(iter(hooks)) != ours[0]:  # a caller's hook came with prepend=True
        hooks.move_to_end(ours[0], last=False)


def copy_groups(state_dict: Any) -> dict[str, Any]:
    """Copy a saved state down to its groups.

    Raises:
        CheckpointError: It is not the state of an optimizer.
    """
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if (
        not isinstance(groups, list | tuple)
        or not isinstance(state_dict.get("state"), Mapping)
        or not all(isinstance(group, Mapping) for group in groups)
        or not all(isinstance(group.get("params"), list | tuple) for group in groups)
    ):
        raise CheckpointError(
            "not the state of an optimizer: expected the keys 'state' and 'param_groups', a list "
            "of groups with 'params'"
        )
    check_ids(groups, state_dict["state"])
    check_steps(groups)
    return {**state_dict, "param_groups": [dict(group) for group in groups]}


def forget_worker(state_dict: Any) -> dict[str, Any]:
    """Copy a saved state without the name of its worker."""
    copied = copy_groups(state_dict)
    for group in copied["param_groups"]:
        group.pop(WORKER_KEY, None)
    return copied


def parse_groups(state_dict: Any, *, step: int, worker: str | None) -> dict[str, Any]:
    """Rebuild the rules in a saved state, and check that it belongs to this worker.

    Args:
        state_dict: The saved state.
        step: The present step, for groups that were saved without one.
        worker: The worker that loads it, from ``name_worker``.

    Raises:
        CheckpointError: It belongs to another worker, a rule is unknown, or groups are at different
            steps.
    """
    copied = copy_groups(state_dict)
    groups = copied["param_groups"]
    for group in groups:
        saved_by = group.pop(WORKER_KEY, None)
        if saved_by not in (None, worker):
            raise _refuse_worker(saved_by, worker)
        if worker is not None:
            group[WORKER_KEY] = worker
        if isinstance(group.get("aggregation"), str):
            group["aggregation"] = parse_rule(group["aggregation"])
    steps = [group.get("step", step) for group in groups]
    if len(set(steps)) > 1:
        raise CheckpointError(f"the saved groups are at different steps: {sorted(set(steps))}")
    return copied


def _refuse_worker(saved_by: object, worker: str | None) -> CheckpointError:
    return CheckpointError(
        f"these are the momenta of worker {shorten(saved_by)}, and this is "
        f"{'a single process' if worker is None else f'worker {worker}'}; every worker has its "
        "own momenta, and formats that keep one copy for all (DCP, one file of rank 0) lose the "
        "others. Use distlion.save_checkpoint and load_checkpoint, whose on_world_change= remaps "
        "momenta to other workers; or remove 'worker' from the saved groups to begin with these"
    )


def list_kept(entry: Mapping[str, Any]) -> list[str]:
    """List the keys of a parameter's state for which each worker has its own tensor."""
    return [key for key in ("exp_avg", *list_worker_state()) if key in entry]


def find_rule(group: Mapping[str, Any]) -> Aggregation:
    """Return a group's rule; without one, as in Lion, a reply is the worker's own direction."""
    rule = group.get("aggregation")
    return rule if isinstance(rule, Aggregation) else TernaryVote()


def map_momenta(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    change: Callable[[Tensor, Any], Any],
) -> dict[str, Any]:
    """Return a saved state with ``change`` applied to each parameter and its momentum."""
    state = dict(state_dict["state"])
    for key, param, _ in _list_momenta(state_dict, groups):
        kept = {name: change(param, state[key][name]) for name in list_kept(state[key])}
        state[key] = {**state[key], **kept}
    return {**state_dict, "state": state}


def describe_cuts(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    describe: Callable[[Tensor, Any], str],
) -> list[str]:
    """Return a line for each momentum that ``describe`` describes."""
    return [
        f"{_name_kept(kept)} of {name}: {cut}"
        for key, param, name in _list_momenta(state_dict, groups)
        for kept in list_kept(state_dict["state"][key])
        if (cut := describe(param, state_dict["state"][key][kept]))
    ]


def check_cuts(lines: Sequence[str]) -> None:
    """Refuse momenta that only all ranks together could cut down to this rank's part.

    Args:
        lines: What ``describe_cuts`` returned.

    Raises:
        CheckpointError: There is one.
    """
    if lines:
        raise CheckpointError(
            f"{lines[0]}. Expected the same mesh and placements. Pass its full_tensor(), of which "
            "load_state_dict() takes this rank's shard; or save and load by "
            "torch.distributed.checkpoint, which reshards. Nothing was changed"
        )


def _list_momenta(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, Tensor, str]]:
    """Yield key, parameter and name of each saved momentum; the state may not fit."""
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):
        for index, (key, param) in enumerate(zip(saved["params"], group["params"], strict=False)):
            entry = state_dict["state"].get(key)
            if isinstance(entry, Mapping) and list_kept(entry):
                yield key, param, f"parameter {index} of group {number}"


def fill_absent_keys(state_dict: Mapping[str, Any], optimizer: LionBase) -> dict[str, Any]:
    """Check a saved state against an optimizer, and fill missing keys from the optimizer.

    Args:
        state_dict: The saved state, as ``copy_groups`` returns it.
        optimizer: The optimizer with the present groups and momenta.

    Returns:
        A new state dict, sharing the tensors.

    Raises:
        CheckpointError: It is not a Lion's; or groups, parameters, a shape, a momentum or a
            hyperparameter do not fit.
    """
    groups, state = optimizer.param_groups, state_dict["state"]
    check_division(state_dict["param_groups"], groups)
    saved_groups = take_lions(state_dict["param_groups"], state, groups)
    check_agreements(saved_groups)
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        for index, (key, param) in enumerate(zip(saved["params"], group["params"], strict=True)):
            is_saved = key in state and (param.requires_grad or not _is_empty(state[key]))
            # A momentum may be left from before its parameter was frozen.
            is_kept = not _is_empty(optimizer.state.get(param, {}))
            if param.requires_grad or is_kept or is_saved:
                name = f"parameter {index} of group {number}"
                sizes_of = (param.shape, optimizer.momentum_make(param).shape)
                needs_momentum = optimizer.keeps_momenta and (is_saved or "aggregation" in saved)
                _check_entry(state.get(key, {}), sizes_of, name, needs_momentum=needs_momentum)
    filled = []
    for saved, group in zip(saved_groups, groups, strict=True):
        filled.append(
            {**{name: value for name, value in group.items() if name != "params"}, **saved}
        )
        try:
            optimizer._check_group(filled[-1])
        except DistlionError as error:
            raise CheckpointError(f"a saved group does not fit: {error}") from error
    return {**state_dict, "param_groups": filled}


def _is_empty(entry: object) -> bool:
    """Return whether an entry holds nothing, as a look at ``optimizer.state[param]`` leaves it."""
    return isinstance(entry, Mapping) and not entry


def _check_entry(
    entry: object, expected: tuple[torch.Size, torch.Size], name: str, *, needs_momentum: bool
) -> None:
    """Check a parameter's saved state.

    Other Lions have no entry for a parameter that never had a gradient. Votes on deltas saved a
    momentum in earlier versions.
    """
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{name}: the saved state is a {type(entry).__name__}; expected keys")
    foreign = sorted(set(map(str, entry)) - {"exp_avg", *list_worker_state(), "step"})
    if foreign:
        raise CheckpointError(
            f"{name}: the saved state holds {shorten(', '.join(foreign))}, which Lion does not "
            "have; did another optimizer save it?"
        )
    if needs_momentum and entry.get("exp_avg") is None:
        raise CheckpointError(
            f"{name} has no momentum 'exp_avg' in the saved state. Expected one, as it is trained "
            "here. Did another optimizer save it, or was it frozen, where torch's "
            "set_optimizer_state_dict leaves it out? load_checkpoint begins with 0 there"
        )
    for kept in list_kept(entry):
        _check_tensor(entry[kept], expected, name, _name_kept(kept))


def _name_kept(key: str) -> str:
    return "momentum" if key == "exp_avg" else key


def _check_tensor(
    found: object, expected: tuple[torch.Size, torch.Size], name: str, what: str
) -> None:
    if not isinstance(found, Tensor) or found.shape not in expected:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise CheckpointError(
            f"{name}: saved {what} has shape {shape}, the parameter has {tuple(expected[0])}"
            + ("" if expected[0] == expected[1] else f", this rank's part {tuple(expected[1])}")
        )
    if is_dtensor(found):
        raise CheckpointError(
            f"{name}: saved {what} is a shard of a DTensor, and the parameter is a whole tensor. "
            "Expected a whole tensor. Call full_tensor() of each on all ranks that hold shards"
        )
    if found.layout is not torch.strided or found.device.type == "meta":
        kind = "is on the meta device" if found.device.type == "meta" else f"is {found.layout}"
        raise CheckpointError(f"{name}: saved {what} {kind}; expected a dense tensor with values")
    if not found.dtype.is_floating_point:
        raise CheckpointError(
            f"{name}: saved {what} has dtype {found.dtype}; expected a floating-point one"
        )


def restore_kept(optimizer: LionBase, state_dict: Mapping[str, Any]) -> None:
    """Replace the optimizer's state by momenta and the rules' state, each in its own dtype.

    torch casts a loaded state to the dtype of its parameter, which would round float32 momenta of
    bfloat16 parameters. A rule's state is 0 where the saved state has none, as from another rule or
    another Lion. A saved momentum is ignored if the optimizer keeps none.
    """
    of_all = ("exp_avg",) if optimizer.keeps_momenta else ()
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        keys = (*of_all, *find_rule(saved).worker_state)
        for index, param in zip(saved["params"], group["params"], strict=True):
            entry = state_dict["state"].get(index, {})
            if not list_kept(entry) and not param.requires_grad:
                continue
            optimizer.state[param] = {}
            for key in keys:
                fresh = optimizer.state[param][key] = optimizer._make_kept(param, key)
                if entry.get(key) is not None:
                    fresh.copy_(optimizer._take_momentum(param, entry[key]))


@contextmanager
def restoring(optimizer: Optimizer) -> Iterator[None]:
    """Put state and groups back if a load fails, for whatever reason."""
    before = optimizer.state, optimizer.param_groups
    try:
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise
