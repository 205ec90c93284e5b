"""Arguments are refused on every rank, before it talks to anybody, by type and text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import distlion
from cluster import run_workers
from distlion import errors
from failures import (
    Caught,
    caught,
    make_optimizer,
    make_params,
    params_of,
    set_grads,
)

pytestmark = pytest.mark.distributed


def same_tensor_twice() -> list[torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.zeros(3))
    return [p, p]


def two_groups_with_one_tensor() -> list[dict[str, Any]]:
    p = torch.nn.Parameter(torch.zeros(3))
    return [{"params": [p]}, {"params": [p]}]


def overlapping_param() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3))]


def of_dtype(dtype: torch.dtype) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (
            "odd",
            torch.nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=dtype.is_floating_point),
        )
    ]


def integer_params() -> list[tuple[str, torch.Tensor]]:
    return [("odd", torch.zeros(3, dtype=torch.int32))]


def frozen_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3), requires_grad=False)]


def params_over_one_storage() -> list[tuple[str, torch.nn.Parameter]]:
    """Two that share an element, among columns of a matrix that share none."""
    memory = torch.zeros(9)
    views = {"even": memory[:6:2], "odd": memory[1:6:2], "a": memory[6:8], "b": memory[7:]}
    return [(name, torch.nn.Parameter(view)) for name, view in views.items()]


def sharded_params() -> list[tuple[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    return [("odd", torch.nn.Parameter(sharded))]


Refusal = tuple[Callable[[], Any], dict[str, Any], type[Exception], tuple[str, ...]]

REFUSED: dict[str, Refusal] = {
    "set": (
        lambda: {p for _, p in make_params()},
        {},
        errors.UnsupportedTypeError,
        ("set", "order"),
    ),
    "empty list": (list, {}, errors.InvalidArgumentError, ("empty|no param",)),
    "same tensor twice": (same_tensor_twice, {}, errors.InvalidArgumentError, ("once",)),
    "same tensor in two groups": (
        two_groups_with_one_tensor,
        {},
        errors.InvalidArgumentError,
        ("once",),
    ),
    "complex": (
        lambda: of_dtype(torch.complex64),
        {},
        errors.UnsupportedTypeError,
        ("odd", "complex64"),
    ),
    "float64": (
        lambda: of_dtype(torch.float64),
        {},
        errors.UnsupportedTypeError,
        ("odd", "float64"),
    ),
    "integer": (integer_params, {}, errors.UnsupportedTypeError, ("odd", "int32")),
    "bool": (
        lambda: [("odd", torch.zeros(3, dtype=torch.bool))],
        {},
        errors.UnsupportedTypeError,
        ("odd", "bool"),
    ),
    "float8": (
        lambda: of_dtype(torch.float8_e4m3fn),
        {},
        errors.UnsupportedTypeError,
        ("odd", "float8_e4m3fn"),
    ),
    "quantized": (
        lambda: [("odd", torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8))],
        {},
        errors.UnsupportedTypeError,
        ("odd", "qint8"),
    ),
    "meta": (
        lambda: [("odd", torch.nn.Parameter(torch.zeros(3, device="meta")))],
        {},
        errors.UnsupportedTypeError,
        ("odd", "meta", "to_empty"),
    ),
    "sharded": (sharded_params, {}, errors.InvalidArgumentError, ("DTensors", "process_group=")),
    "not a leaf": (
        lambda: [("odd", torch.nn.Parameter(torch.zeros(3)) * 2)],
        {},
        errors.InvalidArgumentError,
        ("odd", "leaf"),
    ),
    "strided onto itself": (
        lambda: [("odd", torch.nn.Parameter(torch.zeros(9).as_strided((3, 3), (2, 1))))],
        {},
        errors.InvalidArgumentError,
        ("odd overlaps itself", "clone"),
    ),
    "negated view": (
        lambda: [("odd", torch.nn.Parameter(torch._neg_view(torch.ones(3))))],
        {},
        errors.InvalidArgumentError,
        ("odd", "resolve_neg"),
    ),
    "wrapper of tensors": (
        lambda: [("odd", torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))))],
        {},
        errors.UnsupportedTypeError,
        ("odd is a TwoTensor",),
    ),
    "sparse": (
        lambda: [*make_params(), ("odd", torch.nn.Parameter(torch.eye(3).to_sparse(), False))],
        {},
        errors.UnsupportedTypeError,
        ("odd has the layout torch.sparse_coo", "leave out"),
    ),
    "one storage": (params_over_one_storage, {}, errors.InvalidArgumentError, ("a and b overlap",)),
    "expanded": (overlapping_param, {}, errors.InvalidArgumentError, ("overlap|expand|share",)),
    "all frozen": (frozen_params, {}, errors.InvalidArgumentError, ("requires|frozen|trainable",)),
    "bare tensor": (
        lambda: torch.nn.Parameter(torch.zeros(3)),
        {},
        errors.UnsupportedTypeError,
        ("ensor",),
    ),
    "not a tensor": (lambda: [1.0], {}, errors.UnsupportedTypeError, ("float",)),
    "pair the wrong way round": (
        lambda: [(p, name) for name, p in make_params()],
        {},
        errors.UnsupportedTypeError,
        (r"parameter 0 .*\(Parameter, str\)", r"\(name, tensor\)"),
    ),
    "tuple of three": (
        lambda: [(name, p, 0.1) for name, p in make_params()],
        {},
        errors.UnsupportedTypeError,
        (r"\(str, Parameter, float\)",),
    ),
    "mesh for a group": (
        make_params,
        {"process_group": "gloo"},
        errors.UnsupportedTypeError,
        ("process_group=str", r"mesh\.get_group\(\)"),
    ),
    "negative lr": (make_params, {"lr": -1e-4}, errors.InvalidArgumentError, ("lr", "-0.0001")),
    "nan lr": (make_params, {"lr": float("nan")}, errors.InvalidArgumentError, ("lr", "nan")),
    "infinite lr": (make_params, {"lr": float("inf")}, errors.InvalidArgumentError, ("lr", "inf")),
    "lr beyond float32": (make_params, {"lr": 1e39}, errors.InvalidArgumentError, ("lr", "1e.39")),
    "lr beyond float": (
        make_params,
        {"lr": 10**400},
        errors.InvalidArgumentError,
        ("lr", "1329 bits", "finite"),
    ),
    "lr tensor beyond float32": (
        make_params,
        {"lr": torch.tensor(1e39, dtype=torch.float64)},
        errors.InvalidArgumentError,
        ("lr", "1e.39"),
    ),
    "lr of two elements": (
        make_params,
        {"lr": torch.ones(2)},
        errors.UnsupportedTypeError,
        ("lr", "number"),
    ),
    "weight decay beyond float32": (
        make_params,
        {"lr": 0.0, "weight_decay": 1e39},
        errors.InvalidArgumentError,
        ("weight_decay", "1e.39"),
    ),
    "beta of 1": (make_params, {"betas": (0.9, 1.0)}, errors.InvalidArgumentError, ("beta", "1.0")),
    "negative beta": (
        make_params,
        {"betas": (-0.1, 0.9)},
        errors.InvalidArgumentError,
        ("beta", "-0.1"),
    ),
    "nan beta": (
        make_params,
        {"betas": (float("nan"), 0.9)},
        errors.InvalidArgumentError,
        ("beta", "nan"),
    ),
    "three betas": (
        make_params,
        {"betas": (0.9, 0.9, 0.9)},
        errors.InvalidArgumentError,
        ("beta", "two|2|pair"),
    ),
    "negative weight decay": (
        make_params,
        {"weight_decay": -0.1},
        errors.InvalidArgumentError,
        ("weight_decay", "-0.1"),
    ),
    "nan weight decay": (
        make_params,
        {"weight_decay": float("nan")},
        errors.InvalidArgumentError,
        ("weight_decay", "nan"),
    ),
    "decay past zero": (
        make_params,
        {"lr": 0.5, "weight_decay": 2.0},
        errors.InvalidArgumentError,
        ("weight_decay", "lr"),
    ),
    "rule as text": (
        make_params,
        {"aggregation": "majority"},
        errors.UnsupportedTypeError,
        ("aggregation",),
    ),
    "rule as class": (
        make_params,
        {"aggregation": distlion.MajorityVote},
        errors.UnsupportedTypeError,
        ("aggregation",),
    ),
    "unknown pattern": (
        make_params,
        {"exchange": "ring"},
        errors.DistlionError,
        ("exchange", "ring"),
    ),
    "unknown policy": (
        make_params,
        {"nonfinite": "ignore"},
        errors.InvalidArgumentError,
        ("nonfinite", "ignore"),
    ),
    "record of another kind": (
        make_params,
        {"timeouts": distlion.Precision()},
        errors.UnsupportedTypeError,
        ("timeouts", r"Timeouts\(\.\.\.\)"),
    ),
    "former argument": (
        make_params,
        {"check_every": 7},
        errors.UnsupportedTypeError,
        ("check_every=7", r"replicas=Replicas\(check_every="),
    ),
    "empty buckets": (
        make_params,
        {"bucket_elements": 0},
        errors.InvalidArgumentError,
        ("bucket_elements", "0"),
    ),
}


def refuse_all(rank: int, world_size: int) -> dict[str, Caught | None]:
    return {
        name: caught(None, functools.partial(build, params, options))
        for name, (params, options, _, _) in REFUSED.items()
    }


def build(params: Callable[[], Any], options: dict[str, Any]) -> distlion.DistributedLion:
    return distlion.DistributedLion(params(), **options)


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, Caught | None]]:
    return run_workers(refuse_all, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_argument_is_refused_on_every_rank(
    name: str, refusals: list[dict[str, Caught | None]]
) -> None:
    _, _, kind, fragments = REFUSED[name]
    for results in refusals:
        found = results[name]
        assert found is not None, "nothing was raised"
        assert issubclass(getattr(errors, found.kind, Exception), kind), (
            f"{found.kind}: {found.text}"
        )
        for fragment in fragments:
            assert re.search(fragment, found.text), f"{fragment!r} is not in: {found.text}"


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.UnsupportedTypeError, TypeError),
        (errors.ProcessGroupError, RuntimeError),
        (errors.StepError, RuntimeError),
        (errors.CheckpointError, ValueError),
    ],
)
def test_handlers_for_the_errors_of_pytorch_keep_working(ours: type, builtin: type) -> None:
    assert issubclass(ours, builtin) and issubclass(ours, errors.DistlionError)


def step_with_lr_zero(rank: int, world_size: int) -> list[bytes]:
    optimizer = make_optimizer(lr=0.0, weight_decay=0.1)
    before = [p.detach().clone() for p in params_of(optimizer)]
    set_grads(optimizer, 0, rank)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params_of(optimizer), before, strict=True))
    return [optimizer.state[p]["exp_avg"].abs().sum().item() for p in params_of(optimizer)]


def test_learning_rate_zero_is_legal_and_moves_the_momentum_only() -> None:
    for momenta in run_workers(step_with_lr_zero, 2):
        assert all(m > 0 for m in momenta)
