"""Local steps of one worker: what was changed behind its back, and arguments that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import InvalidArgumentError, StepInputError, UnsupportedTypeError
from drawn import make_params
from local_runs import (
    EVERY,
    SHAPES,
    WRITES,
    add_to_inner,
    are_equal,
    freeze,
    load_weights,
    make_lion,
    make_sgd,
    train,
)


def make(make_inner: Any = make_sgd, **options: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    params = make_params(SHAPES)
    return distlion.LocalSteps(make_inner(params.values()), **{"every": EVERY, **options}), params


def test_a_group_that_the_inner_optimizer_refuses_changes_nothing() -> None:
    optimizer, _ = make(make_lion)
    more = nn.Parameter(torch.ones(3))
    with pytest.raises(InvalidArgumentError, match=r"lr=-1\.0"):
        optimizer.add_param_group({"params": [more], "lr": -1.0})
    assert len(optimizer.param_groups) == len(optimizer.outer_optimizer.param_groups) == 1
    assert len(optimizer.common_point) == len(SHAPES)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [more], "lr": 1e-3})
    assert len(optimizer.common_point) == len(SHAPES) + 1


def test_a_group_that_votes_cannot_take_leaves_the_inner_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, params = make(make_lion)
    train(optimizer, params.values(), 0, 0, 1)
    known = set(optimizer.state)

    def fail(group: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(optimizer.outer_optimizer, "add_param_group", fail)
    with pytest.raises(RuntimeError, match="no room"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == known
    assert len(optimizer.common_point) == len(SHAPES)


def unfreeze(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    params["frozen"].requires_grad_(True)


def remove(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    optimizer.inner.param_groups[0]["params"].pop(1)


CHANGES = {
    "parameter 1 of group 0, shape .5,. was written to": load_weights,
    "shape .3,. is in the inner optimizer alone": add_to_inner,
    "was trained when LocalSteps was made, and is frozen": freeze,
    "shape .2,. was frozen when this optimizer was made": unfreeze,
    "parameter 1 of group 0, shape .5,. is no longer in the inner optimizer": remove,
}


@pytest.mark.parametrize(
    "change", CHANGES.values(), ids=[each.__name__ for each in CHANGES.values()]
)
@pytest.mark.parametrize("at", [0, EVERY])
def test_what_was_changed_behind_the_optimizers_back_is_no_delta(change: Any, at: int) -> None:
    params = make_params(SHAPES)
    params["frozen"] = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = distlion.LocalSteps(make_sgd(params.values()), every=EVERY)
    trained = [param for name, param in params.items() if name != "frozen"]
    train(optimizer, trained, 0, 0, at)
    before = [each.clone() for each in optimizer.common_point]
    change(optimizer, params)
    words = next(words for words, each in CHANGES.items() if each is change)
    train(optimizer, trained, 0, at, at + EVERY - 1)
    for _ in range(2):  # once more when it is called again
        with pytest.raises(StepInputError, match=words):
            optimizer.vote()
    with pytest.raises(StepInputError, match=words):
        train(optimizer, trained, 0, at + EVERY - 1, at + EVERY)
    assert are_equal(optimizer.common_point, before)
    assert optimizer.committed_step == at // EVERY


@pytest.mark.parametrize("write", WRITES, ids=[each.__name__ for each in WRITES])
@pytest.mark.parametrize("at", [0, EVERY])
def test_writes_that_torch_does_not_count_are_no_delta(write: Any, at: int) -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, at)
    before = [each.clone() for each in optimizer.common_point]
    write(optimizer, params)
    with pytest.raises(StepInputError, match=r"shape \(5,\) was written to"):
        train(optimizer, params.values(), 0, at, at + EVERY)
    assert are_equal(optimizer.common_point, before)


def test_memory_that_was_exchanged_with_its_values_is_as_before() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, EVERY)
    params["p1"].data = params["p1"].data.clone()
    train(optimizer, params.values(), 0, EVERY, 2 * EVERY)
    assert optimizer.committed_step == 2


def test_weights_that_were_exchanged_for_a_while_are_as_before() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, EVERY)
    kept = params["p1"].detach().clone()
    with torch.no_grad():
        params["p1"].zero_()
        params["p1"].copy_(kept)
    train(optimizer, params.values(), 0, EVERY, 2 * EVERY)
    assert optimizer.committed_step == 2


def test_a_vote_without_a_step_since_the_last_moves_nothing() -> None:
    optimizer, params = make(aggregation=distlion.ResidualVote(), outer_momentum=0.5)
    optimizer.vote()
    assert optimizer.committed_step == 0
    train(optimizer, params.values(), 0, 0, EVERY)
    before = [each.clone() for each in optimizer.common_point]
    optimizer.vote()
    assert are_equal(optimizer.common_point, before)
    assert optimizer.committed_step == 1
    load_weights(optimizer, params)
    with pytest.raises(InvalidArgumentError, match="was written to"):
        optimizer.vote()
    assert params["p1"][0] == 7.0


def test_hooks_of_states_run() -> None:
    optimizer, _ = make()
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda own: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "more": 3})
    optimizer.register_load_state_dict_pre_hook(lambda own, state: called.append(state["more"]))
    optimizer.register_load_state_dict_post_hook(lambda own: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", 3, "loaded"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"common_device": "meta"}, "common_device='meta': a meta tensor has no values"),
        ({"common_device": "gpu"}, "common_device='gpu' cannot be used here"),
        ({"common_device": "cuda:77"}, "common_device='cuda:77' cannot be used here"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        make(**options)


@pytest.mark.parametrize("name", ["delay", "parts"])
def test_former_arguments_are_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=f"{name}=2: .* vote less often by every="):
        make(**{name: 2})


def test_the_common_point_is_on_a_device() -> None:
    with pytest.raises(UnsupportedTypeError, match="common_device=3: expected a device"):
        make(common_device=3)
    assert make(common_device=torch.device("cpu"))[0].common_point[0].device.type == "cpu"


def test_weights_loaded_after_a_state_are_found_at_the_first_step() -> None:
    """Accelerate loads each optimizer's own state when it prepares it."""
    model = torch.nn.Linear(3, 2)
    optimizer = distlion.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    optimizer.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        model.weight.add_(1.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(StepInputError, match="written to between two periods"):
        optimizer.step()


def test_a_state_may_be_loaded_before_its_weights() -> None:
    saved, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first = distlion.LocalSteps(torch.optim.SGD(saved.parameters(), lr=0.1), every=2)
    optimizer = distlion.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    optimizer.load_state_dict(first.state_dict())
    model.load_state_dict(saved.state_dict())
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert optimizer.committed_step == 1
