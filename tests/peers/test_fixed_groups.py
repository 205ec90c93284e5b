"""What is changed in place in param groups, and in what they hold, is refused and not saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion import errors
from distlion.optim import VotingBase
from distlion.step.arguments import FORMER
from distlion.step.hyperparameters import OF_THE_WHOLE
from distlion.step.settings import Settings
from distlion_lab.baselines.virtual import VirtualBaseline

Make = Callable[[list[tuple[str, nn.Parameter]]], Any]

OPTIMIZERS: dict[str, Make] = {
    "alone": lambda params: distlion.DistributedLion(params, lr=0.25),
    "virtual": lambda params: distlion.VirtualCluster(params, lr=0.25, workers=2),
}


def make_params() -> list[tuple[str, nn.Parameter]]:
    return [("first", nn.Parameter(torch.ones(6))), ("second", nn.Parameter(torch.ones(2, 4)))]


def take_step(optimizer: Any, params: list[tuple[str, nn.Parameter]]) -> None:
    for _, param in params:
        if param.grad is None:
            param.grad = torch.ones_like(param)
    if isinstance(optimizer, distlion.VirtualCluster):
        optimizer.collect(0)
    optimizer.step()
    optimizer.zero_grad()


Change = Callable[[VotingBase], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "another rule": (
        lambda o: o.param_groups[0].update(aggregation=distlion.TernaryVote()),
        "aggregation of group 0 is TernaryVote(), and was MajorityVote(tie='random')",
    ),
    "a rule as text": (
        lambda o: o.param_groups[0].update(aggregation="MajorityVote()"),
        "aggregation of group 0 is 'MajorityVote()'",
    ),
    "no rule": (lambda o: o.param_groups[0].pop("aggregation"), "aggregation of group 0 is None"),
    "another worker": (lambda o: o.param_groups[0].update(worker="7"), "worker of group 0 is '7'"),
    "other names": (
        lambda o: o.param_groups[0]["param_names"].pop(),
        "param_names of group 0 is ['first']",
    ),
    "a parameter less": (lambda o: o.param_groups[0]["params"].pop(), "replaced since"),
    "a parameter more": (
        lambda o: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(1))),
        "replaced since",
    ),
    "a group less": (lambda o: o.param_groups.pop(), "replaced since"),
    "a group more": (
        lambda o: o.param_groups.append({**o.param_groups[0], "params": []}),
        "group 1",
    ),
    "steps apart": (
        lambda o: (o.add_param_group(late_group()), o.param_groups[1].update(step=5)),
        "the param groups are at steps [1, 5]",
    ),
    "another state": (
        lambda o: setattr(o, "state", defaultdict(dict)),
        "the state of this optimizer was replaced",
    ),
    "a step that is true": (
        lambda o: o.param_groups[0].update(step=True),
        "step of group 0 is True",
    ),
}


def late_group() -> dict[str, Any]:
    return {"params": [("late", nn.Parameter(torch.ones(1)))]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_no_step_reads_again_is_refused_and_not_saved(kind: str, change: str) -> None:
    params = make_params()
    optimizer = OPTIMIZERS[kind](params)
    take_step(optimizer, params)
    before = [param.clone() for _, param in params]
    spoil, said = CHANGES[change]
    spoil(optimizer)
    with pytest.raises(errors.StepInputError) as refused:
        take_step(optimizer, params)
    assert said in str(refused.value) and "nothing was committed" in str(refused.value)
    assert all(map(torch.equal, before, (param for _, param in params)))
    assert all(param.grad is not None for _, param in params)
    with pytest.raises(errors.CheckpointError) as unsaved:
        optimizer.state_dict()
    assert said in str(unsaved.value)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_that_was_replaced_may_be_set_back_or_loaded(kind: str) -> None:
    params = make_params()
    optimizer = OPTIMIZERS[kind](params)
    take_step(optimizer, params)
    former, saved = optimizer.state, optimizer.state_dict()
    optimizer.state = defaultdict(dict)
    optimizer.state = former
    take_step(optimizer, params)
    optimizer.state = defaultdict(dict)
    optimizer.load_state_dict(saved)
    momentum = optimizer.state[params[0][1]]["exp_avg"]
    before = momentum.clone()
    take_step(optimizer, params)
    assert not torch.equal(momentum, before)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], momentum)


def reset_on_the_second(rank: int, world_size: int, overlap: bool) -> tuple[str, Tensor]:
    (name, param), _ = make_params()
    optimizer = distlion.DistributedLion([(name, param)], lr=0.25, overlap=overlap)
    param.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    former = optimizer.state
    if rank == 1:
        optimizer.state = defaultdict(dict)
    param.sum().backward()
    with pytest.raises(errors.StepInputError) as refused:
        optimizer.step()
    assert torch.equal(param, torch.full((6,), 0.75))
    optimizer.state = former
    optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
    return str(refused.value), param.detach()


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_all_workers_hear_of_a_state_that_one_replaced_and_train_on(overlap: bool) -> None:
    for said, param in run_workers(reset_on_the_second, 2, overlap):
        assert "rank 1" in said and "the state of this optimizer was replaced" in said
        assert torch.equal(param, torch.full((6,), 0.5))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_schedulers_write_and_other_integers_for_a_step_are_taken(kind: str) -> None:
    params = make_params()
    optimizer = OPTIMIZERS[kind](params)
    optimizer.param_groups[0].update(initial_lr=1.0, max_lr=2.0, step=np.int64(7))
    state = optimizer.state_dict()
    assert type(state["param_groups"][0]["step"]) is int
    take_step(optimizer, params)
    assert (optimizer.committed_step, type(optimizer.param_groups[0]["step"])) == (8, int)


@pytest.mark.parametrize("number", [np.float32, np.float64])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_of_a_schedule_by_numpy_are_taken_and_saved_as_pythons(
    kind: str, number: Callable[[float], Any]
) -> None:
    params = make_params()
    optimizer = OPTIMIZERS[kind](params)
    optimizer.param_groups[0].update(lr=number(0.25), weight_decay=number(0.5))
    take_step(optimizer, params)
    (group,) = optimizer.state_dict()["param_groups"]
    assert [(type(group[key]), group[key]) for key in ("lr", "weight_decay")] == [
        (float, 0.25),
        (float, 0.5),
    ]
    optimizer.load_state_dict(optimizer.state_dict())


def test_arguments_of_the_whole_optimizer_are_refused_in_a_group() -> None:
    own = {"params", "lr", "betas", "weight_decay", "aggregation"}
    arguments = {field.name for field in fields(Settings)} | {"process_group"}
    assert (arguments - own) | FORMER.keys() == OF_THE_WHOLE
    for make in (distlion.Lion, distlion.DistributedLion):
        params = [param for _, param in make_params()]
        with pytest.raises(errors.InvalidArgumentError, match=r"seed=3 in a param group.* Give it"):
            make([{"params": params, "seed": 3}])
        with pytest.raises(errors.InvalidArgumentError, match=r"Give precision=Precision\(round"):
            make([{"params": params, "rounding": "stochastic"}])
        with pytest.raises(errors.InvalidArgumentError, match=r"agreement=Agreement\(every=5"):
            make([{"params": params, "agreement": distlion.Agreement(every=5)}])


Spoil = Callable[[Any, nn.Parameter], object]

INPUTS: dict[str, tuple[Spoil, str]] = {
    "cast": (lambda o, p: setattr(p, "data", p.data.half()), "second is float16 of shape (2, 4)"),
    "resized": (lambda o, p: setattr(p, "data", torch.ones(8)), "was float32 of shape (2, 4)"),
    "gradient cast": (
        lambda o, p: setattr(p.grad, "data", torch.ones(2, 4, dtype=torch.float64)),
        "the gradient of second is float64",
    ),
    "gradient resized": (
        lambda o, p: setattr(p.grad, "data", torch.ones(4, 2)),
        "the gradient of second is float32 of shape (4, 2)",
    ),
    "momentum cast": (
        lambda o, p: o.state[p].update(exp_avg=o.state[p]["exp_avg"].bfloat16()),
        "the momentum of second is bfloat16",
    ),
    "momentum resized": (
        lambda o, p: o.state[p].update(exp_avg=torch.ones(3)),
        "the momentum of second is float32 of shape (3,)",
    ),
    "lr without a value": (
        lambda o, p: o.param_groups[0].update(lr=torch.ones((), device="meta")),
        "lr=tensor(..., device='meta', size=()): expected a number",
    ),
    "no lr": (lambda o, p: o.param_groups[0].pop("lr"), "a param group has no 'lr'"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "lion"])
def test_what_one_process_cannot_compute_with_is_named_and_nothing_moves(
    kind: str, name: str
) -> None:
    params = make_params()
    optimizer = OPTIMIZERS.get(kind, lambda params: distlion.Lion(params, lr=0.25))(params)
    take_step(optimizer, params)
    first, second = (param for _, param in params)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    spoil, said = INPUTS[name]
    spoil(optimizer, second)
    before = first.clone(), optimizer.state[first]["exp_avg"].clone()
    with pytest.raises((errors.InvalidArgumentError, errors.UnsupportedTypeError)) as refused:
        take_step(optimizer, params)
    assert said in str(refused.value)
    assert kind == "lion" or isinstance(refused.value, errors.StepInputError)
    assert torch.equal(first, before[0])
    assert torch.equal(optimizer.state[first]["exp_avg"], before[1])


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "lion"])
@pytest.mark.parametrize(
    "view",
    [lambda grad: torch._neg_view(-grad), lambda grad: grad[:1].expand(6)],
    ids=["a negative bit", "one element for all"],
)
def test_a_gradient_is_read_as_torch_reads_it(kind: str, view: Callable[[Tensor], Tensor]) -> None:
    moved = []
    for give in (lambda grad: view(grad).clone(), view):
        param = nn.Parameter(torch.zeros(6))
        make = OPTIMIZERS.get(kind, lambda params: distlion.Lion(params, lr=0.25))
        optimizer = make([("only", param)])
        param.grad = give(torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0]))
        take_step(optimizer, [("only", param)])
        moved.append(param.detach())
    assert torch.equal(*moved)


@pytest.mark.parametrize("worker", [1.0, True, "0", None, torch.tensor(1.0)])
def test_a_worker_that_is_no_integer_is_refused(worker: Any) -> None:
    params = make_params()
    cluster = OPTIMIZERS["virtual"](params)
    baseline = VirtualBaseline(torch.optim.SGD([p for _, p in params]), workers=2)
    for call in (cluster.collect, cluster.exp_avg, baseline.collect):
        with pytest.raises(errors.UnsupportedTypeError, match="expected an integer"):
            call(worker)


@pytest.mark.parametrize("worker", [np.int64(0), torch.tensor(0)])
def test_a_worker_may_be_an_integer_of_another_library(worker: Any) -> None:
    params = make_params()
    for _, param in params:
        param.grad = torch.ones_like(param)
    cluster = OPTIMIZERS["virtual"](params)
    cluster.collect(worker)
    with pytest.raises(errors.InvalidArgumentError, match="worker 0 was collected already"):
        cluster.collect(0)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "lion"])
def test_a_parameter_without_a_shape_yet_is_refused_by_name(kind: str) -> None:
    make = OPTIMIZERS.get(kind, distlion.Lion)
    for params in (nn.LazyLinear(3).parameters(), nn.LazyLinear(3).named_parameters()):
        with pytest.raises(errors.UnsupportedTypeError, match="lazy module and has no shape yet"):
            make(list(params))
