"""The state of local steps of sharded parameters: all in "state" and "param_groups".

torch's own formats keep these two keys alone, and one copy of equal keys. So a tensor that differs
between workers has a first dim for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError, UnsupportedTypeError
from distlion.local.inner_optimizers import check_owners
from distlion.local.inner_shards import KINDS_KEY, PRESENT_KEY, InnerShards
from distlion.local.state import (
    CALL,
    LOCAL_KEY,
    drop_marks,
    export_progress,
    list_marks,
    parse_progress,
)
from distlion.local.votes import LocalVotes, Progress
from distlion.optim.arguments import label_params
from distlion.optim.saved_groups import check_division
from distlion.optim.saved_state import reading_state, restoring
from distlion.step.param import local_tensor
from distlion.step.shard_pieces import ShardPieces

_COMMON, _MOMENTUM, _OWN = "common_point", "outer_momentum", "worker_param"

_Taken = dict[str, dict[Tensor, Tensor]]
"""By key of an entry, the shard that this rank takes of it for each parameter."""

_BEGUN = "vote_begun"
"""Key that earlier versions saved with delay=; ignored."""


def export_sharded_state(inner: Optimizer, votes: LocalVotes) -> dict[str, Any]:
    """Return the state of all workers' local steps, with this rank's part of each tensor.

    Raises:
        CheckpointError: An exception cut the commit of a vote short.
        UnsupportedTypeError: A value of the inner state has no saved form.
    """
    pieces, state_dict = _get_pieces(votes), inner.state_dict()
    state, names = {}, label_params(inner.param_groups)
    ours = _collect_ours(votes)
    for saved, group in zip(state_dict["param_groups"], inner.param_groups, strict=True):
        entries = {key: state_dict["state"].get(key, {}) for key in saved["params"]}
        like: dict[str, Any] = next(filter(None, entries.values()), {})
        for (key, entry), param in zip(entries.items(), group["params"], strict=True):
            if not entry and param not in ours:  # frozen
                continue
            own = ours.get(param, {})
            _check_keys(names[param], entry, {*own, KINDS_KEY, PRESENT_KEY})
            state[key] = {**InnerShards(pieces, param, names[param]).export(entry, like), **own}
    numbers = {
        **_describe_votes(votes),
        **export_progress(votes.progress, votes.every),
        "committed_step": votes.common.committed_step,
    }
    groups = [{**group, LOCAL_KEY: dict(numbers)} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _get_pieces(votes: LocalVotes) -> ShardPieces:
    assert votes.shard_pieces is not None  # checked by the caller
    return votes.shard_pieces


def _check_keys(name: str, entry: Mapping[str, Any], taken: set[str]) -> None:
    both = sorted(taken & entry.keys())
    if both:
        raise UnsupportedTypeError(
            f"{name}: the inner optimizer has state under {', '.join(both)}, which names state of "
            "LocalSteps. Expected other names. Rename it in the inner optimizer"
        )


def _collect_ours(votes: LocalVotes) -> dict[Tensor, dict[str, Any]]:
    """Collect the saved form of all state beside the inner optimizer's, for each parameter."""
    pieces, momenta = _get_pieces(votes), _map_momenta(votes)
    rule_state = dict(_pair_entries(votes, votes.common.state_dict()))
    ours: dict[Tensor, dict[str, Any]] = {}
    for param, point in votes.pairs.pairs:
        ours[param] = {
            # Copies: torch's formats load in place, before anything is checked.
            _COMMON: point.detach().clone(),
            _OWN: pieces.export(param, local_tensor(param).detach().clone()),
            **{_name_vote_key(key): value for key, value in rule_state[point].items()},
        }
        if point in momenta:
            ours[param][_MOMENTUM] = momenta[point].detach().clone()
    return ours


def _map_momenta(votes: LocalVotes) -> dict[Tensor, Tensor]:
    moving = [param.param for param in votes.common.session.params]
    return dict(zip(moving, votes.stage.momentum.buffers, strict=False))


def _pair_entries(
    votes: LocalVotes, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter of the common point with its entry in a state of the votes."""
    groups = zip(state_dict["param_groups"], votes.common.param_groups, strict=True)
    for saved, group in groups:
        for key, point in zip(saved["params"], group["params"], strict=True):
            if key in state_dict["state"]:
                yield point, state_dict["state"][key]


def _describe_votes(votes: LocalVotes) -> dict[str, Any]:
    """Describe the settings that must be equal when a state is loaded."""
    common = votes.common
    return {
        "format": 1,
        "workers": _get_pieces(votes).n_workers,
        "outer": votes.stage.outer.describe(),
        "outer_betas": [0.0, 0.0],  # as in states of 0.1.0
        "aggregation": repr(common.param_groups[0]["aggregation"]),
    }


def _list_needed(votes: LocalVotes) -> dict[Tensor, dict[str, torch.Size]]:
    """List the keys that each parameter's entry needs beside the inner state, with their shapes."""
    rule_state, momenta = dict(_pair_entries(votes, votes.common.state_dict())), _map_momenta(votes)
    needed = {}
    for param, point in votes.pairs.pairs:
        of_workers = [_OWN, *map(_name_vote_key, rule_state[point])]
        of_all = [_COMMON, *([_MOMENTUM] if point in momenta else [])]
        stacked = _get_pieces(votes).stacked_shape(param)
        needed[param] = dict.fromkeys(of_workers, stacked) | dict.fromkeys(of_all, param.shape)
    return needed


def _name_vote_key(key: str) -> str:
    """Return the key of a rule's state in an entry."""
    return f"vote_{key}"


@dataclass
class _Saved:
    """A saved state that fits an optimizer, as far as this rank sees.

    Attributes:
        votes: The votes of the optimizer.
        progress: Its place between votes.
        committed_step: Number of votes committed.
        groups: Its param groups, as the inner optimizer loads them.
        entries: (key, parameter, entry) of each parameter with state.
        lines: Lines about the cuts of its tensors.
    """

    votes: LocalVotes
    progress: Progress
    committed_step: int
    groups: list[dict[str, Any]]
    entries: list[tuple[Any, Tensor, Mapping[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, inner: Optimizer, votes: LocalVotes, state_dict: Mapping[str, Any]) -> _Saved:
        """Check a saved state without other ranks.

        Raises:
            CheckpointError: It does not fit.
        """
        groups, names = state_dict["param_groups"], label_params(inner.param_groups)
        check_division(groups, inner.param_groups)
        check_owners(inner, groups)
        numbers = _read_numbers(groups, votes)
        progress = parse_progress(numbers, votes.every, "the saved state")
        saved = cls(votes, progress, numbers["committed_step"], drop_marks(groups))
        needed = _list_needed(votes)
        for group, present in zip(groups, inner.param_groups, strict=True):
            for key, param in zip(group["params"], present["params"], strict=True):
                entry = state_dict["state"].get(key, {})
                if entry or param in needed:
                    shards = InnerShards(_get_pieces(votes), param, names[param])
                    saved._add(key, param, entry, shards, needed.get(param, {}))
        return saved

    def _add(
        self,
        key: Any,
        param: Tensor,
        entry: Mapping[str, Any],
        shards: InnerShards,
        needed: Mapping[str, torch.Size],
    ) -> None:
        """Check the entry of a parameter, and add it."""
        pieces = _get_pieces(self.votes)
        for name, shape in needed.items():
            shards.check_shape(entry, name, shape)
            self.lines.append(pieces.describe_cut(param, entry[name]))
        self.lines += shards.check(entry, {*needed, _BEGUN})
        self.entries.append((key, param, entry))

    def describe(self) -> str:
        """Describe it in words that must be equal on all ranks, as they cut it together."""
        cuts = [line for line in self.lines if line]
        digest = sha256("\n".join(cuts).encode()).hexdigest()[:16]
        said = self.progress.describe()
        return f"{said}, {len(cuts)} tensors to be cut anew ({digest})" if cuts else said

    def cut(self, names: Mapping[Tensor, str]) -> tuple[dict[Any, dict[str, Any]], _Taken]:
        """Cut all tensors down to this worker's row and this rank's shard; all ranks call it.

        Returns:
            The inner optimizer's entries, and all else.
        """
        pieces = _get_pieces(self.votes)
        inner: dict[Any, dict[str, Any]] = {}
        taken: _Taken = {_COMMON: {}, _OWN: {}, _MOMENTUM: {}}
        for key, param, entry in self.entries:
            if state := InnerShards(pieces, param, names[param]).load(entry):
                inner[key] = state
            for name, shards in taken.items():
                if name in entry:
                    shards[param] = pieces.localize(param, entry[name])
        return inner, taken

    def make_votes(self) -> dict[str, Any]:
        """Return the state of the votes."""
        votes = self.votes
        state_dict = votes.common.state_dict()
        entries = {param: entry for _, param, entry in self.entries}
        saved = {point: entries[param] for param, point in votes.pairs.pairs}
        for point, own in _pair_entries(votes, state_dict):
            own.update({key: saved[point][_name_vote_key(key)] for key in own})
        groups = [{**group, "step": self.committed_step} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    @torch.no_grad()
    def apply(self, taken: _Taken) -> None:
        """Overwrite all state beside the inner optimizer's and the votes'."""
        votes, momenta = self.votes, _map_momenta(self.votes)
        for param, point in votes.pairs.pairs:
            local_tensor(point).copy_(taken[_COMMON][param])
            local_tensor(param).copy_(taken[_OWN][param])
            if point in momenta:
                local_tensor(momenta[point]).copy_(taken[_MOMENTUM][param])
        votes.progress = self.progress
        # A model's state has one worker's weights for all: one that is loaded after this is found.
        own = votes.pairs.own
        votes.period.take([(param, local_tensor(param).detach().clone()) for param in own])


def _read_numbers(groups: list[dict[str, Any]], votes: LocalVotes) -> Mapping[str, Any]:
    """Return the numbers in the groups of a saved state, once they are checked."""
    marks = [group.get(LOCAL_KEY) for group in groups]
    numbers = marks[0]
    if not isinstance(numbers, Mapping):
        raise CheckpointError(
            "the state was saved by LocalSteps of parameters that were not sharded. Expected one "
            "of DTensors. Load it into an optimizer of whole parameters"
        )
    if any(mark != numbers for mark in marks):
        raise CheckpointError(
            f"the saved groups differ in {LOCAL_KEY!r}. Expected the same in all. Load what was "
            "saved together"
        )
    for key, present in _describe_votes(votes).items():
        if numbers.get(key) != present:
            raise CheckpointError(
                f"{key} was {numbers.get(key)!r} in the saved state, and is {present!r} here. "
                "Expected the same. Make the optimizer with the saved setting"
            )
    step = numbers.get("committed_step")
    if type(step) is not int or step < 0:
        raise CheckpointError(
            f"committed_step was {step!r} in the saved state; expected a number of votes, 0 or more"
        )
    return numbers


def load_sharded_state(inner: Optimizer, votes: LocalVotes, state_dict: Mapping[str, Any]) -> None:
    """Load the result of ``export_sharded_state``; all ranks must call it.

    1 check without other ranks, 2 agree, 3 cut tensors and load the inner state, 4 agree, 5 load
    the state of the votes, 6 overwrite the rest.

    Args:
        inner: The optimizer that takes the local steps.
        votes: The votes on its deltas.
        state_dict: The state; tensors may be whole, or have other shards.

    Raises:
        CheckpointError: It does not fit, on some rank; on every rank, and nothing was changed.
    """
    saved, taken, rule_state, problem, said = None, None, {}, None, ""
    # 1
    try:
        with reading_state():
            saved = _Saved.read(inner, votes, state_dict)
            said = saved.describe()
    except CheckpointError as error:
        problem = error
    # 2
    votes.agree(CALL, problem, said)
    assert saved is not None  # or all ranks had raised
    with restoring(inner):
        # 3
        try:
            with reading_state():
                entries, taken = saved.cut(label_params(inner.param_groups))
                inner.load_state_dict(
                    {**state_dict, "state": entries, "param_groups": saved.groups}
                )
                rule_state = saved.make_votes()
        except CheckpointError as error:
            problem = error
        # 4
        votes.agree(CALL, problem)
        # 5
        votes.common.load_state_dict(rule_state)
    # 6
    assert taken is not None
    saved.apply(taken)


def has_sharded_form(votes: LocalVotes, state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state is to be loaded by ``load_sharded_state``."""
    return votes.shard_pieces is not None and bool(list_marks(state_dict))
