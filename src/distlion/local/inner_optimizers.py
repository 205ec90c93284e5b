"""Several inner optimizers, each with its own parameters, as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from distlion.optim.arguments import label_params
from distlion.optim.saved_state import restoring
from distlion.optim.state_hooks import run_hooks_of_loading, run_hooks_of_saving

OWNER_KEY = "inner_optimizer"
"""Key of each saved group: number and class of its optimizer."""


class InnerOptimizers(Optimizer):
    """Take the steps of several optimizers, one after the other.

    ``param_groups`` lists the groups of all of them in order, the same dicts, so that a scheduler
    may have all groups or one optimizer's. ``state`` reads the state of all.

    Args:
        optimizers: Optimizers that share no parameter.

    Attributes:
        optimizers: The same.

    Raises:
        InvalidArgumentError: There are none, or two of them have a parameter in common.
        UnsupportedTypeError: One of them evaluates the closure itself, as LBFGS does.
    """

    _is_set_up = False

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        if not self.optimizers:
            raise InvalidArgumentError(
                "inner is an empty list; expected an optimizer, or a list of optimizers"
            )
        self._check_params()
        for each in self.optimizers:
            _check_closure(each)
        # torch sets up the hooks of this one; groups and state stay where they are.
        super().__init__(self.param_groups, {})
        self._is_set_up = True

    def _check_params(self) -> None:
        names, owners = label_params(self.param_groups), list_owners(self)
        held: dict[int, str | None] = {}
        for group, owner in zip(self.param_groups, owners, strict=True):
            for param in group["params"]:
                if held.setdefault(id(param), owner) != owner:
                    raise InvalidArgumentError(
                        f"{names[param]} is in the inner optimizers {held[id(param)]} and {owner}. "
                        "Expected each parameter in one of them. Take it out of the other"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return [group for each in self.optimizers for group in each.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_set_up:
            for each, own in self._split(groups):
                each.param_groups = own

    def _split(
        self, groups: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[Optimizer, list[dict[str, Any]]]]:
        """Yield each optimizer with its own of the groups of all."""
        begin = 0
        for each in self.optimizers:
            end = begin + len(each.param_groups)
            yield each, list(groups[begin:end])
            begin = end

    @property
    def state(self) -> Any:
        """The state of all optimizers, to be read; each writes its own."""
        return _States([each.state for each in self.optimizers])

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_set_up:
            for each, own in zip(self.optimizers, state.states, strict=True):
                each.state = own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group, which could belong to any of the optimizers.

        Raises:
            UnsupportedTypeError: Always.
        """
        if self._is_set_up:
            raise UnsupportedTypeError(
                f"a param group was added to {len(self.optimizers)} inner optimizers, and each of "
                "them could take it. Expected all parameters at construction. Make the inner "
                "optimizers and LocalSteps anew on all workers"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each optimizer.

        Args:
            closure: Re-evaluates the model and returns the loss; run once, before all steps.

        Returns:
            The result of ``closure``, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all optimizers."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return one state of all optimizers, with their parameters numbered in order.

        Raises:
            UnsupportedTypeError: The state of one has no place in it.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        n_params = 0
        for each in self.optimizers:
            own = each.state_dict()
            n_own = _check_form(own, type(each).__name__)
            state |= {n_params + key: entry for key, entry in own["state"].items()}
            groups += [
                {**group, "params": [n_params + key for key in group["params"]]}
                for group in own["param_groups"]
            ]
            n_params += n_own
        for group, owner in zip(groups, list_owners(self), strict=True):
            group[OWNER_KEY] = owner
        return run_hooks_of_saving(self, {"state": state, "param_groups": groups})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same optimizers into each of them, or into none.

        Raises:
            CheckpointError: Its groups belong to other optimizers.
        """
        state_dict = run_hooks_of_loading(self, state_dict)
        groups = state_dict["param_groups"]
        check_owners(self, groups)
        with restoring(self):
            for each, own in self._split(groups):
                # Optimizers number their parameters from 0.
                keys = [key for group in own for key in group["params"]]
                numbers = {key: number for number, key in enumerate(keys)}
                entries = {
                    numbers[key]: entry
                    for key, entry in state_dict["state"].items()
                    if key in numbers
                }
                bare = [
                    {**_drop_owner(group), "params": [numbers[key] for key in group["params"]]}
                    for group in own
                ]
                each.load_state_dict({"state": entries, "param_groups": bare})
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the optimizers, of which this one is made anew."""
        return type(self), (self.optimizers,)


class _States(Mapping[Any, Any]):
    """The states of several optimizers as one mapping, from which entries can be deleted.

    Args:
        states: Their states. They are read by key only if they have it, as they make defaults.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        self.states = states

    def __getitem__(self, key: Any) -> Any:
        for state in self.states:
            if key in state:
                return state[key]
        raise KeyError(key)

    def __delitem__(self, key: Any) -> None:
        for state in self.states:
            state.pop(key, None)

    def __iter__(self) -> Iterator[Any]:
        for state in self.states:
            yield from state

    def __len__(self) -> int:
        return sum(map(len, self.states))


def list_owners(inner: Optimizer) -> list[str | None]:
    """List for each param group the number and class of its optimizer; None if there is one."""
    if not isinstance(inner, InnerOptimizers):
        return [None] * len(inner.param_groups)
    return [
        f"{number} ({type(each).__name__})"
        for number, each in enumerate(inner.optimizers)
        for _ in each.param_groups
    ]


def check_owners(inner: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that the same optimizers saved these groups.

    Args:
        inner: The inner optimizer, or several as one.
        saved: The saved groups.

    Raises:
        CheckpointError: Others did.
    """
    found, expected = [group.get(OWNER_KEY) for group in saved], list_owners(inner)
    if found != expected and any((*found, *expected)):
        raise CheckpointError(
            f"the saved param groups belong to {_describe(found)}, and this optimizer's to "
            f"{_describe(expected)}. Expected the same inner optimizers in the same order, with "
            "as many groups each. Make them as they were when this was saved"
        )


def _describe(owners: Sequence[str | None]) -> str:
    if not any(owners):
        return f"one inner optimizer with {len(owners)} groups"
    return f"inner optimizers {', '.join(map(str, owners))}"


def _drop_owner(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != OWNER_KEY}


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer does not step without a closure."""
    params = inspect.signature(optimizer.step).parameters.values()
    needed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in needed for each in params)


def _check_closure(optimizer: Optimizer) -> None:
    """Check that an optimizer steps without a closure, as one call serves all optimizers.

    Raises:
        UnsupportedTypeError: It does not.
    """
    if needs_closure(optimizer):
        raise UnsupportedTypeError(
            f"{type(optimizer).__name__} evaluates the closure in its step, which moves only a "
            "part of the parameters here. Expected optimizers that step on given gradients. Use it "
            "as the only inner optimizer"
        )


def _check_form(state_dict: Mapping[str, Any], name: str) -> int:
    """Check that a state is in torch's form, and return its number of parameters.

    Raises:
        UnsupportedTypeError: It is not.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    is_numbered = keys == list(range(len(keys))) and state_dict["state"].keys() <= set(keys)
    if state_dict.keys() != {"state", "param_groups"} or not is_numbered:
        raise UnsupportedTypeError(
            f"the state dict of {name} has keys {sorted(map(str, state_dict))} and more than state "
            "of numbered parameters, which has no place beside other inner optimizers. Expected "
            "the form of torch.optim. Use it as the only inner optimizer"
        )
    return len(keys)
