"""Several inner optimizers in one ``LocalSteps``: who owns what, schedules, states, refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import distlion
from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from drawn import make_params, set_grads
from local_runs import (
    EVERY,
    SHAPES,
    STEPS,
    are_equal,
    copies,
    make_adamw,
    make_lion,
    make_muon_and_adamw,
    needs_muon,
    step_inner,
    train,
)

pytestmark = needs_muon

Params = dict[str, nn.Parameter]


def make(make_inner: Any = make_muon_and_adamw, **options: Any) -> tuple[Any, Params]:
    params = make_params(SHAPES)
    return distlion.LocalSteps(make_inner(params.values()), **{"every": EVERY, **options}), params


def make_two_adamws(params: Any) -> list[torch.optim.Optimizer]:
    first, *rest = params
    return [torch.optim.AdamW([first], lr=1e-2), torch.optim.AdamW(rest, lr=3e-3)]


def make_swapped(params: Any) -> list[torch.optim.Optimizer]:
    return make_muon_and_adamw(params)[::-1]


def make_muon_and_lion(params: Any) -> list[torch.optim.Optimizer]:
    first, *rest = params
    return [torch.optim.Muon([first]), distlion.Lion(rest)]


# Who owns what


def test_groups_are_the_same_dicts_and_state_is_found_by_parameter() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, 1)
    muon, adamw = optimizer.inner.optimizers
    assert [*map(id, optimizer.param_groups)] == [
        *map(id, (*muon.param_groups, *adamw.param_groups))
    ]
    assert optimizer.state[params["p0"]] is muon.state[params["p0"]]
    assert optimizer.state[params["p1"]] is adamw.state[params["p1"]]
    assert list(optimizer.state) == [*params.values()]
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(1)]
    assert len(muon.state) == 1
    optimizer.zero_grad()
    assert all(param.grad is None for param in params.values())


def test_groups_that_one_optimizer_has_replaced_are_found() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, 1)
    muon, adamw = optimizer.inner.optimizers
    muon.load_state_dict(muon.state_dict())
    assert optimizer.param_groups[0] is muon.param_groups[0]
    assert optimizer.state[params["p0"]] is muon.state[params["p0"]]
    assert optimizer.param_groups[1] is adamw.param_groups[0]


def share_a_parameter(params: Params) -> Any:
    everything = [*params.items()]
    return [torch.optim.Muon(everything[:1]), torch.optim.AdamW(everything)]


def step_by_closure(params: Params) -> Any:
    first, *rest = params.values()
    return [torch.optim.Muon([first]), torch.optim.LBFGS(rest)]


REFUSED: dict[str, tuple[Callable[[Params], Any], type[Exception], str]] = {
    "a parameter in two": (
        share_a_parameter,
        InvalidArgumentError,
        r"p0 is in the inner optimizers 0 \(Muon\) and 1 \(AdamW\)",
    ),
    "none": (lambda params: [], InvalidArgumentError, "inner is an empty list"),
    "a closure": (step_by_closure, UnsupportedTypeError, "LBFGS evaluates the closure"),
    "votes": (
        lambda params: [distlion.DistributedLion(params.values())],
        UnsupportedTypeError,
        "inner is a DistributedLion",
    ),
    "no optimizer": (
        lambda params: [*params.values()],
        UnsupportedTypeError,
        "inner is a Parameter",
    ),
    "a set": (
        lambda params: {torch.optim.SGD(params.values())},
        UnsupportedTypeError,
        "inner is a set",
    ),
}


@pytest.mark.parametrize(("make_inner", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_a_list_that_cannot_step_together_is_refused(
    make_inner: Callable[[Params], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        distlion.LocalSteps(make_inner(make_params(SHAPES)))


def test_a_group_that_any_of_them_could_take_is_refused_and_nothing_changes() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, 4)
    with pytest.raises(UnsupportedTypeError, match="added to 2 inner optimizers"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.common_point) == 3
    train(optimizer, params.values(), 0, 4, STEPS)
    assert optimizer.committed_step == STEPS // EVERY


# Steps


def test_a_closure_runs_once_before_all_steps() -> None:
    optimizer, params = make(make_two_adamws)
    called: list[list[Tensor]] = []

    def closure() -> Tensor:
        called.append(copies(params.values()))
        set_grads(params.values(), 0, len(called))
        return torch.tensor(7.0)

    before = copies(params.values())
    assert optimizer.step(closure) == 7.0
    assert len(called) == 1
    assert are_equal(called[0], before)
    assert not any(map(torch.equal, before, params.values()))


def test_hooks_of_all_optimizers_run_once_a_step() -> None:
    optimizer, params = make()
    called: list[str] = []
    for name, each in {
        "outside": optimizer,
        "all": optimizer.inner,
        "muon": optimizer.inner.optimizers[0],
        "adamw": optimizer.inner.optimizers[1],
    }.items():
        each.register_step_post_hook(lambda *_, name=name: called.append(name))
    train(optimizer, params.values(), 0, 0, 2)
    assert called == ["muon", "adamw", "all", "outside"] * 2


def test_each_optimizer_has_a_schedule_of_its_own_or_all_have_one() -> None:
    ended = []
    for on_all in (False, True):
        optimizer, params = make()
        muon, adamw = optimizer.inner.optimizers
        schedules: list[Any] = [CosineAnnealingLR(muon, STEPS), StepLR(adamw, 2, gamma=0.5)]
        if on_all:
            schedules = [StepLR(optimizer, 2, gamma=0.5)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a schedule finds out if its optimizer never steps
            for step in range(STEPS):
                train(optimizer, params.values(), 0, step, step + 1)
                for schedule in schedules:
                    schedule.step()
        ended.append((params, [group["lr"] for group in optimizer.param_groups]))
    (own, own_rates), (_, same_rates) = ended
    assert own_rates == pytest.approx([0.0, 3e-3 / 2**5])
    assert same_rates == pytest.approx([2e-2 / 2**5, 3e-3 / 2**5])

    expected = make_params(SHAPES)
    inner = make_muon_and_adamw(expected.values())
    schedules = [CosineAnnealingLR(inner[0], STEPS), StepLR(inner[1], 2, gamma=0.5)]
    for step in range(STEPS):
        set_grads(expected.values(), 0, step)
        step_inner(inner)
        for schedule in schedules:
            schedule.step()
    assert are_equal(own.values(), expected.values())


def test_a_schedule_of_momenta_that_not_all_have_is_refused_by_torch() -> None:
    optimizer, _ = make()
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=STEPS, cycle_momentum=False)


def test_a_broken_momentum_of_muon_begins_anew() -> None:
    optimizer, params = make(nonfinite="abstain")
    train(optimizer, params.values(), 0, 0, EVERY)
    muon = optimizer.inner.optimizers[0]
    muon.state[params["p0"]]["momentum_buffer"][0, 0] = torch.nan
    before = optimizer.common_point[0].clone()
    with pytest.warns(distlion.errors.InnerStateResetWarning, match="parameter 0 of group 0"):
        train(optimizer, params.values(), 0, EVERY, 2 * EVERY)
    assert torch.equal(optimizer.common_point[0], before)
    assert params["p0"] not in muon.state
    assert params["p1"] in optimizer.state


@pytest.mark.parametrize("which", ["all", "one"])
def test_a_scaler_unscales_each_inner_optimizer_once(which: str) -> None:
    optimizer, params = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for param in params.values():
        param.grad = torch.full_like(param, 8.0)
    scaler.unscale_(optimizer.inner if which == "all" else optimizer.inner.optimizers[0])
    scaler.step(optimizer)
    assert all((each.grad == 1).all() for each in params.values())


# States


def test_a_state_numbers_the_parameters_of_all() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, 1)
    state = optimizer.inner.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1, 2]]
    owners = [group["inner_optimizer"] for group in state["param_groups"]]
    assert owners == ["0 (Muon)", "1 (AdamW)"]
    assert [sorted(entry) for entry in state["state"].values()] == [
        ["momentum_buffer"],
        *[["exp_avg", "exp_avg_sq", "step"]] * 2,
    ]
    assert all("inner_optimizer" not in group for group in optimizer.param_groups)
    optimizer.load_state_dict(optimizer.state_dict())
    assert all("inner_optimizer" not in group for group in optimizer.param_groups)


SAVED_BY: dict[str, tuple[Any, Any]] = {
    "another order": (make_swapped, make_muon_and_adamw),
    "another optimizer": (make_muon_and_lion, make_muon_and_adamw),
    "one optimizer": (make_adamw, make_two_adamws),
    "several": (make_two_adamws, make_lion),
}


@pytest.mark.parametrize(("make_first", "make_second"), SAVED_BY.values(), ids=SAVED_BY)
def test_a_state_of_other_optimizers_is_refused(make_first: Any, make_second: Any) -> None:
    saved, params = make(make_first)
    train(saved, params.values(), 0, 0, 4)
    optimizer, others = make(make_second)
    train(optimizer, others.values(), 0, 0, 2)
    before = [group["lr"] for group in optimizer.param_groups]
    for state in (saved.state_dict(), saved.inner.state_dict()):
        with pytest.raises(CheckpointError, match="Expected the same inner optimizers in the same"):
            optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == before
    assert optimizer.local_step == 2


def test_a_state_that_the_second_optimizer_refuses_leaves_the_first_as_it_was() -> None:
    optimizer, params = make(make_muon_and_lion)
    train(optimizer, params.values(), 0, 0, 4)
    states = optimizer.state_dict(), optimizer.inner.state_dict()
    muon, lion = optimizer.inner.optimizers
    kept = muon.state, muon.param_groups, lion.state, lion.param_groups
    for state, load in zip(
        states, (optimizer.load_state_dict, optimizer.inner.load_state_dict), strict=True
    ):
        state["state"][1] = {"exp_avg": torch.zeros(3)}
        with pytest.raises(CheckpointError, match="saved momentum has shape"):
            load(state)
        now = muon.state, muon.param_groups, lion.state, lion.param_groups
        # Lists are compared by their elements, which are the same dicts.
        assert [*map(id, (now[0], *now[1], now[2], *now[3]))] == [
            *map(id, (kept[0], *kept[1], kept[2], *kept[3]))
        ]


class Counting(torch.optim.SGD):
    """An optimizer with state beside its parameters'."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


def test_state_beside_the_parameters_is_refused_by_name() -> None:
    def make_counting(params: Any) -> Any:
        first, *rest = params
        return [torch.optim.Muon([first]), Counting(rest)]

    optimizer, _ = make(make_counting)
    with pytest.raises(UnsupportedTypeError, match="the state dict of Counting has keys"):
        optimizer.state_dict()


def test_hooks_of_states_run_for_each_and_for_all() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, 1)
    called: list[str] = []
    for name, each in {"all": optimizer.inner, "muon": optimizer.inner.optimizers[0]}.items():
        each.register_state_dict_pre_hook(lambda *_, name=name: called.append(f"save {name}"))
        each.register_state_dict_post_hook(lambda *_, name=name: called.append(f"saved {name}"))
        each.register_load_state_dict_pre_hook(lambda *_, name=name: called.append(f"load {name}"))
        each.register_load_state_dict_post_hook(
            lambda *_, name=name: called.append(f"loaded {name}")
        )
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [
        *("save all", "save muon", "saved muon", "saved all"),
        *("load all", "load muon", "loaded muon", "loaded all"),
    ]


def test_a_copy_has_parameters_and_optimizers_of_its_own() -> None:
    optimizer, params = make()
    train(optimizer, params.values(), 0, 0, 1)
    inner = copy.deepcopy(optimizer.inner)
    own = [param for group in inner.param_groups for param in group["params"]]
    assert are_equal(own, params.values())
    for param in own:
        param.grad = torch.ones_like(param)
    inner.step()
    assert not any(map(torch.equal, own, params.values()))
