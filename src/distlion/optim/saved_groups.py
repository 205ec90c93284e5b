"""Checks of a saved state's groups: a Lion's, with the same parameters in each of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from distlion.errors import CheckpointError, InvalidArgumentError
from distlion.optim.arguments import check_names
from distlion.step.agreement import AGREEMENT_KEY, is_agreement
from distlion.step.hyperparameters import check_step

WORKER_KEY = "worker"
"""Key of a param group: the owner of its momenta. It reveals a format that keeps one copy."""

# Every Lion has these; each other optimizer of torch also has something else that is on.
_OF_EVERY_LION = ("lr", "betas", "weight_decay")
_OF_OURS = {"params", "param_names", "aggregation", "step", WORKER_KEY, AGREEMENT_KEY}
# Written by torch's schedulers.
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# Settings of how another library computes a Lion step.
_NEUTRAL = {"foreach", "fused", "capturable", "weight_decouple"}
# Numbers of other optimizers, for which 0 is a value like any other.
_NUMBERS = {"eps", "momentum", "dampening", "alpha", "rho", "lr_decay"}


def check_ids(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    """Check that each parameter of a saved state has its own id, and each entry a parameter.

    Raises:
        CheckpointError: One of them does not.
    """
    seen: set[Hashable] = set()
    for number, group in enumerate(groups):
        for key in group["params"]:
            # A tuple is hashable only if all its items are.
            if not isinstance(key, int | str):
                raise CheckpointError(
                    f"saved group {number} names a parameter by a {type(key).__name__}, which "
                    "cannot be an id. Expected a number, or a name. Load what state_dict() returned"
                )
            if key in seen:
                raise CheckpointError(
                    f"saved group {number} names parameter {key} twice. Expected an id for each "
                    "parameter. Load what state_dict() returned"
                )
            seen.add(key)
    unknown = [key for key in state if not isinstance(key, int | str) or key not in seen]
    if unknown:
        raise CheckpointError(
            f"the saved state has an entry for {shorten(unknown[0])}, which no group names. "
            "Expected entries for the parameters of its groups only. Remove the others"
        )


def check_steps(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that the step of each group that has one is a count.

    Raises:
        CheckpointError: It is not.
    """
    for number, group in enumerate(groups):
        if "step" in group:
            try:
                check_step(group, number)
            except InvalidArgumentError as error:
                raise CheckpointError(f"the saved state does not fit: {error}") from error


def take_lions(
    saved: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    present: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return a Lion's groups without another library's switches that are off.

    A group with a rule was saved by an optimizer that votes, and is returned unchanged.

    Args:
        saved: The saved groups.
        state: The saved entries.
        present: The groups that they are loaded into; their other keys are known.

    Raises:
        CheckpointError: Another optimizer saved them.
    """
    for number, group in enumerate(saved):
        if "aggregation" not in group and group.get("step", 0) and not state:
            raise CheckpointError(
                f"saved group {number} is at step {group['step']}, and holds no momentum: it is "
                "not a Lion's. Expected 'exp_avg' of its parameters. Begin with a new optimizer"
            )
    return [
        dict(group) if "aggregation" in group else _take_foreign(group, known, number)
        for number, (group, known) in enumerate(zip(saved, present, strict=True))
    ]


def _take_foreign(
    group: Mapping[str, Any], known: Mapping[str, Any], number: int
) -> dict[str, Any]:
    missing = [key for key in _OF_EVERY_LION if key not in group]
    if missing:
        raise CheckpointError(
            f"saved group {number} is not a Lion's: it has no {', '.join(missing)}. Expected lr, "
            "betas and weight_decay. Begin with a new optimizer, or load a state of a Lion"
        )
    accepted = {*_OF_EVERY_LION, *_OF_OURS, *_SCHEDULED, *known}
    foreign = [key for key in group if key not in accepted]
    on = [key for key in foreign if key in _NUMBERS or (key not in _NEUTRAL and _is_on(group[key]))]
    if on:
        raise CheckpointError(
            f"saved group {number} holds {shorten(', '.join(map(repr, on)))}, which Lion does not "
            "have. Expected the groups of a Lion: lr, betas, weight_decay. Begin with a new "
            "optimizer if AdamW or another optimizer saved it. If a Lion did, remove the other "
            "keys from the saved groups"
        )
    return {key: value for key, value in group.items() if key not in foreign}


def _is_on(value: Any) -> bool:
    """Return True if a foreign key may change a step: None, False and 0 mean off."""
    return not (value is None or (isinstance(value, int | float) and value == 0))


def describe_move(
    saved: Sequence[int], present: Sequence[int], name_of: Callable[[int, int, int], str]
) -> str:
    """Describe the first parameter that is in another group now; "" for none.

    Args:
        saved: The sizes of the saved groups.
        present: The sizes of the present groups.
        name_of: Function from a parameter's number, group and index there to its name.
    """
    before, after = _walk_places(saved), _walk_places(present)
    for number, ((then, _), (now, index)) in enumerate(zip(before, after, strict=False)):
        if then != now:
            name = name_of(number, now, index)
            return f"{name} was in group {then} when it was saved, and is in group {now} now"
    return ""


def _walk_places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Walk through each parameter's group, and its index there.

    Saved sizes are a file's claims: a list of so many places could fill the memory.
    """
    for number, size in enumerate(sizes):
        for index in range(size):
            yield number, index


def check_division(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]
) -> None:
    """Check that each group holds the parameters that it held when it was saved.

    Where both have names, a name at another place means that the parameter has moved. Unknown names
    are ignored, as wrappers of a model add prefixes. Two models in one optimizer may have the same
    names, of which each then has several places.

    Raises:
        CheckpointError: A parameter is in another group, or at another place in it.
    """
    sizes, now = ([len(group["params"]) for group in groups] for groups in (saved, present))
    if sizes != now:
        moved = describe_move(sizes, now, lambda _, group, index: _name(present, group, index))
        raise CheckpointError(
            f"saved groups hold {sizes} parameters, this optimizer's hold {now}"
            f"{moved and f': {moved}'}. Expected the same parameters in each group, as lr and "
            "other settings are theirs. Make the optimizer with the groups that were saved"
        )
    _check_saved_names(saved)
    places: dict[str, list[tuple[int, int]]] = {}
    for number, group in enumerate(present):
        for index, name in enumerate(group.get("param_names", ())):
            places.setdefault(name, []).append((number, index))
    for number, group in enumerate(saved):
        for index, name in enumerate(group.get("param_names", ())):
            there = places.get(name, [(number, index)])
            if (number, index) not in there:
                other, place = there[0]
                raise CheckpointError(
                    f"{name!r} is parameter {index} of group {number} in the saved state, and "
                    f"parameter {place} of group {other} here. Expected the same place, as "
                    "states are loaded by places. Make the optimizer with the groups that were "
                    "saved"
                )


def _name(groups: Sequence[Mapping[str, Any]], number: int, index: int) -> str:
    names = groups[number].get("param_names")
    return names[index] if names else f"parameter {index} of group {number}"


def _check_saved_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that all parameters of a saved state have names, or that none has."""
    named = ["param_names" in group for group in groups]
    if any(named) and not all(named):
        raise CheckpointError(
            f"saved group {named.index(True)} has 'param_names' and group {named.index(False)} has "
            "none; remove 'param_names' from the saved groups"
        )
    for group in groups if all(named) else ():
        try:
            check_names(group["param_names"], len(group["params"]))
        except InvalidArgumentError as error:
            raise CheckpointError(f"a saved group does not fit: {error}") from error


def check_agreements(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that running agreements of workers are a list of numbers from 0 to 1.

    Raises:
        CheckpointError: They are not.
    """
    for number, group in enumerate(groups):
        kept = group.get(AGREEMENT_KEY, [])
        if not is_agreement(kept):
            raise CheckpointError(
                f"saved group {number} has {AGREEMENT_KEY} {shorten(kept)}. Expected a list of "
                f"numbers from 0 to 1. Remove {AGREEMENT_KEY} from the saved groups, after which "
                "all workers begin alike"
            )


def shorten(value: object) -> str:
    """Shorten a value for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
