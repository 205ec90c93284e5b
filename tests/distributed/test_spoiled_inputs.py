"""A worker whose parameters, momenta, gradients or groups cannot be used: one error on all ranks.

Each case spoils something on some ranks between construction and a step. Nothing is committed, and
after the damage is undone all workers go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
import oracle
from cluster import run_workers
from distlion import errors
from failures import Caught, assert_raised, caught, make_optimizer, params_of
from tiers import in_tiers

pytestmark = pytest.mark.distributed

Undo = Callable[[], None]
Spoil = Callable[[distlion.DistributedLion], Undo]


def second_of(optimizer: distlion.DistributedLion) -> Any:
    return params_of(optimizer)[1]


def replace_data(tensor: Tensor, data: Tensor) -> Undo:
    before = tensor.data
    tensor.data = data
    return lambda: setattr(tensor, "data", before)


def spoil_param(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(optimizer: distlion.DistributedLion) -> Undo:
        param = second_of(optimizer)
        undo = replace_data(param, change(param.data))
        param.grad = torch.ones_like(param)
        return undo

    return spoil


def spoil_gradient(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(optimizer: distlion.DistributedLion) -> Undo:
        grad = second_of(optimizer).grad
        return replace_data(grad, change(grad.data))

    return spoil


def spoil_kept(key: str, change: Callable[[Tensor], object]) -> Spoil:
    def spoil(optimizer: distlion.DistributedLion) -> Undo:
        state = optimizer.state[second_of(optimizer)]
        before = state[key]
        state[key] = change(before)
        return lambda: state.update({key: before})

    return spoil


def drop_kept(optimizer: distlion.DistributedLion) -> Undo:
    param = second_of(optimizer)
    before = optimizer.state.pop(param)
    return lambda: optimizer.state.update({param: before})


def spoil_group(key: str, value: Any) -> Spoil:
    def spoil(optimizer: distlion.DistributedLion) -> Undo:
        group = optimizer.param_groups[0]
        before = dict(group)
        group[key] = value

        def undo() -> None:
            group.clear()
            group.update(before)

        return undo

    return spoil


def drop_key(key: str) -> Spoil:
    def spoil(optimizer: distlion.DistributedLion) -> Undo:
        before = optimizer.param_groups[0].pop(key)
        return lambda: optimizer.param_groups[0].update({key: before})

    return spoil


def overlap_itself(tensor: Tensor) -> Tensor:
    return torch.zeros(1).expand(tensor.numel())


def free(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    copied.untyped_storage().resize_(0)
    return copied


CASES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "parameter cast": (
        spoil_param(Tensor.bfloat16),
        ("second is bfloat16", "was float32", "Make the optimizer after"),
    ),
    "parameter of another shape": (
        spoil_param(lambda p: p.view(13, 10)),
        ("second is .*(13, 10)", "was .*(130,)"),
    ),
    "parameter of fewer elements": (
        spoil_param(lambda p: p[:7].clone()),
        ("second is .*(7,)", "was .*(130,)"),
    ),
    "parameter that overlaps itself": (spoil_param(overlap_itself), ("second overlaps itself",)),
    "gradient cast": (
        spoil_gradient(Tensor.double),
        ("gradient of second is float64", "expected float32"),
    ),
    "gradient of another shape": (
        spoil_gradient(lambda g: g.view(13, 10)),
        ("gradient of second is .*(13, 10)", "expected .*(130,)"),
    ),
    "gradient of one element": (
        spoil_gradient(lambda g: g[:1].clone()),
        ("gradient of second is .*(1,)", "expected .*(130,)"),
    ),
    "gradient without memory": (spoil_gradient(free), ("gradient of second has no memory",)),
    "momentum cast": (
        spoil_kept("exp_avg", Tensor.bfloat16),
        ("momentum of second is bfloat16", "expected float32"),
    ),
    "momentum of another shape": (
        spoil_kept("exp_avg", lambda m: m[:5].clone()),
        ("momentum of second is .*(5,)", "expected .*(130,)"),
    ),
    "momentum on another device": (
        spoil_kept("exp_avg", lambda m: m.to("meta")),
        ("momentum of second is .*meta", "expected .*cpu"),
    ),
    "momentum that is no tensor": (
        spoil_kept("exp_avg", lambda m: 0.5),
        ("momentum of second is a float", "expected float32"),
    ),
    "sparse momentum": (spoil_kept("exp_avg", Tensor.to_sparse), ("momentum of second",)),
    "no momentum": (drop_kept, ("momentum of second is missing",)),
}
GROUPS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "lr without a value": (spoil_group("lr", torch.ones((), device="meta")), ("lr of group 0",)),
    "no weight decay": (drop_key("weight_decay"), ("weight_decay of group 0: None",)),
    "step as text": (spoil_group("step", "abc"), ("step of group 0: 'abc'",)),
    "no step": (spoil_group("step", None), ("step of group 0: None",)),
    "negative step": (spoil_group("step", -3), ("step of group 0: -3",)),
    "half a step": (spoil_group("step", 2.5), ("step of group 0: 2.5",)),
    "step beyond all": (spoil_group("step", 2**70), ("step of group 0: 1180591620717411303424",)),
}
"""Of these, one worker's values differ from others': the error of that has both."""

FOR_ALL = ("parameter cast", "gradient cast", "no momentum")
"""Cases that are also tried on all ranks at once: then nobody differs from anybody."""

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"exchange": distlion.AllReduce()},
    "buckets in a server": {
        "bucket_elements": 64,
        "exchange": distlion.ParameterServer(),
        "nonfinite": "abstain",
    },
    "overlap": {"overlap": True, "bucket_elements": 64, "exchange": distlion.AllReduce()},
    "feedback": {"aggregation": distlion.FeedbackVote(), "exchange": distlion.AllGather()},
    "clipping in nodes": {
        "exchange": distlion.AllGather(),
        "nodes": distlion.Nodes(ranks_per_node=2),
        "clip_norm": distlion.ClipNorm(1.0, scope="global"),
        "nonfinite": "abstain",
    },
}


def copy_held(optimizer: distlion.DistributedLion) -> list[Any]:
    held: list[Any] = [group["step"] for group in optimizer.param_groups]
    for param in params_of(optimizer):
        kept = optimizer.state.get(param, {}).get("exp_avg")
        held += [param.data.clone(), kept.clone() if isinstance(kept, Tensor) else kept]
    return held


def are_alike(one: list[Any], other: list[Any]) -> bool:
    return all(
        a.is_meta or a.is_sparse or torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def set_gradients(
    optimizer: distlion.DistributedLion, step: int, rank: int, *, hooks: bool
) -> None:
    """As a backward pass does, of which overlap hears by hooks."""
    for index, param in enumerate(params_of(optimizer)):
        given = torch.from_numpy(oracle.gradient(9, step, rank, index, param.numel()))
        if hooks:
            (param * given).sum().backward()
        else:
            param.grad = given


def spoil_and_go_on(
    rank: int, world_size: int, form: str, names: tuple[str, ...], ranks: tuple[int, ...]
) -> dict[str, tuple[Caught | None, bool, int]]:
    found = {}
    for name in names:
        optimizer = make_optimizer(**FORMS[form])
        set_gradients(optimizer, 0, rank, hooks=form == "overlap")
        optimizer.step()
        optimizer.zero_grad()
        spoil, _ = (CASES | GROUPS)[name]
        undo: Undo = lambda: None  # noqa: E731
        if form == "overlap" and not name.startswith("gradient") and rank in ranks:
            undo = spoil(optimizer)  # before the backward pass, whose hooks encode
        if "parameter" not in name or form != "overlap" or rank not in ranks:
            set_gradients(optimizer, 1, rank, hooks=form == "overlap")
        if rank in ranks and (form != "overlap" or name.startswith("gradient")):
            undo = spoil(optimizer)
        before = copy_held(optimizer)
        caught_here = caught(None, optimizer.step)
        is_unchanged = are_alike(copy_held(optimizer), before)
        undo()
        if name in GROUPS and len(ranks) < world_size:
            found[name] = (caught_here, is_unchanged, optimizer.committed_step)
            continue
        for param in params_of(optimizer):
            param.grad = None
        set_gradients(optimizer, 1, rank, hooks=False)
        after = caught(None, optimizer.step)
        assert after is None, after
        optimizer.verify_replicas()
        found[name] = (caught_here, is_unchanged, optimizer.committed_step)
    return found


def assert_one_error(
    outcomes: list[dict[str, tuple[Caught | None, bool, int]]], culprits: tuple[int, ...]
) -> None:
    for name in outcomes[0]:
        for rank, outcome in enumerate(outcomes):
            found, is_unchanged, steps = outcome[name]
            said = assert_raised(found, errors.StepInputError, *CASES[name][1])
            assert said.culprits == culprits, (name, rank, said)
            assert (said.rank, said.step) == (rank, 1), (name, said)
            assert f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))}" in (
                said.text
            )
            assert "nothing was committed" in said.text
            assert (is_unchanged, steps) == (True, 2), (name, rank)


# Frames carry the same for every kind of damage: all kinds in one form, some in all.
EVERYWHERE = ("parameter cast", "gradient of one element", "no momentum")


@pytest.mark.parametrize("form", in_tiers(FORMS, lambda form: form in ("plain", "overlap")))
def test_what_one_worker_cannot_vote_with_is_one_error_on_all(form: str) -> None:
    world_size = 4 if "nodes" in FORMS[form] else 3
    names = tuple(CASES) if form == "plain" else EVERYWHERE
    if form == "overlap":  # what a gradient becomes after its vote has left is another error
        names = tuple(name for name in names if not name.startswith("gradient"))
    assert_one_error(run_workers(spoil_and_go_on, world_size, form, names, (1,)), (1,))


def test_what_no_worker_can_vote_with_is_one_error_on_all() -> None:
    assert_one_error(run_workers(spoil_and_go_on, 2, "plain", FOR_ALL, (0, 1)), (0, 1))


def test_a_number_of_one_worker_that_no_step_takes_is_one_error_on_all() -> None:
    for outcome in run_workers(spoil_and_go_on, 3, "plain", tuple(GROUPS), (1,)):
        for name, (found, is_unchanged, steps) in outcome.items():
            (said,) = GROUPS[name][1]
            raised = assert_raised(found, errors.ConfigMismatchError, f"{said}.* on rank 1")
            assert (raised.culprits, raised.step, is_unchanged, steps) == ((1,), 1, True, 1), name


def test_a_number_of_all_workers_that_no_step_takes_is_named_and_they_go_on() -> None:
    for outcome in run_workers(spoil_and_go_on, 2, "plain", tuple(GROUPS), (0, 1)):
        for name, (found, is_unchanged, steps) in outcome.items():
            raised = assert_raised(found, errors.StepInputError, "ranks 0, 1 cannot vote")
            assert (raised.culprits, raised.step, is_unchanged, steps) == ((0, 1), 1, True, 2), name
            if "step" in name:
                assert "step of group 0 is" in raised.text
                assert "expected an integer from 0 to 2^53" in raised.text


def replace_after_backward(rank: int, world_size: int) -> tuple[Caught | None, bool]:
    optimizer = make_optimizer(**FORMS["overlap"])
    set_gradients(optimizer, 0, rank, hooks=True)
    if rank == 1:
        second = second_of(optimizer)
        second.data = second.data.clone()
    before = copy_held(optimizer)
    return caught(None, optimizer.step), are_alike(copy_held(optimizer), before)


def test_a_parameter_replaced_after_its_vote_has_left_is_one_error_on_all() -> None:
    """A commit would write to memory that the parameter has left."""
    for found, is_unchanged in run_workers(replace_after_backward, 3):
        said = "second or its momentum was replaced between backward and step"
        assert assert_raised(found, errors.StepInputError, said).culprits == (1,)
        assert is_unchanged
