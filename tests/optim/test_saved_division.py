"""Settings of a group belong to its parameters: a state of other groups is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import CheckpointError

NAMES = ("a", "b", "c", "d")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Lion": distlion.Lion,
    "DistributedLion": distlion.DistributedLion,
    "VirtualCluster": lambda params, **options: distlion.VirtualCluster(
        params, workers=2, **options
    ),
}
VOTING = [name for name in OPTIMIZERS if name != "Lion"]
EVERY = pytest.mark.parametrize("kind", OPTIMIZERS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.ones(3)))


def make(kind: str, *division: str, named: bool = True) -> tuple[Model, Any]:
    """Make an optimizer whose groups hold the parameters that each of these words lists."""
    model = Model()
    groups = []
    for number, names in enumerate(division):
        params = [getattr(model, name) for name in names]
        held = list(zip(names, params, strict=True)) if named else params
        groups.append({"params": held, "lr": 10.0 ** -(2 + 2 * number)})
    return model, OPTIMIZERS[kind](groups)


def list_lrs(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@EVERY
@pytest.mark.parametrize("named", [False, True])
def test_a_state_of_groups_of_other_sizes_names_what_moved(named: bool, kind: str) -> None:
    state = make(kind, "ab", "cd", named=named)[1].state_dict()
    _, other = make(kind, "abc", "d", named=named)
    name = "c" if named else "parameter 2 of group 0"
    with pytest.raises(
        CheckpointError, match=rf"\[2, 2\].*\[3, 1\].*{name}.* in group 1.* group 0"
    ):
        other.load_state_dict(state)
    assert list_lrs(other) == [1e-2, 1e-4]


@EVERY
def test_a_state_whose_names_stand_elsewhere_names_what_moved(kind: str) -> None:
    state = make(kind, "ab", "cd")[1].state_dict()
    _, other = make(kind, "ac", "bd")
    with pytest.raises(CheckpointError, match=r"'b' is parameter 1 of group 0 .* of group 1 here"):
        other.load_state_dict(state)


@EVERY
@pytest.mark.parametrize("in_one_group", [False, True])
def test_a_state_of_two_models_whose_names_are_the_same_loads(
    in_one_group: bool, kind: str
) -> None:
    """As of a generator and its critic, given as ``[*one.named_parameters(), *two...]``."""
    pairs = [list(Model().named_parameters()) for _ in range(2)]
    groups = [{"params": pairs[0] + pairs[1]}] if in_one_group else [{"params": p} for p in pairs]
    optimizer = OPTIMIZERS[kind](groups)
    optimizer.load_state_dict(optimizer.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["param_names"][:2] = "ba"
    with pytest.raises(CheckpointError, match=r"'b' is parameter 0 of group 0 .* parameter 1 of"):
        optimizer.load_state_dict(state)


@EVERY
def test_a_state_whose_names_are_unknown_loads_by_order(kind: str) -> None:
    """Wrappers put words before names: ``_orig_mod.``, ``module.``."""
    state = copy.deepcopy(make(kind, "ab", "cd")[1].state_dict())
    for group in state["param_groups"]:
        group["param_names"] = [f"_orig_mod.{name}" for name in group["param_names"]]
    make(kind, "ab", "cd")[1].load_state_dict(state)


@pytest.mark.parametrize("kind", VOTING)
@pytest.mark.parametrize("present", [("abc", "d"), ("a", "bcd"), ("abcd",), ("a", "b", "cd")])
def test_a_checkpoint_of_other_groups_names_what_moved(
    tmp_path: Path, present: tuple[str, ...], kind: str
) -> None:
    model, optimizer = make(kind, "ab", "cd")
    distlion.save_checkpoint(tmp_path, model, optimizer)
    model, other = make(kind, *present)
    before = list_lrs(other)
    moved = "b" if len(present[0]) == 1 else "c"
    with pytest.raises(CheckpointError, match=f"{moved} was in group . .* is in group . now"):
        distlion.load_checkpoint(tmp_path, model, other)
    assert list_lrs(other) == before
    model, other = make(kind, "ab", "cd")
    distlion.load_checkpoint(tmp_path, model, other)
