"""Writes to parameters since their period began are found, counted or not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import distlion
from distlion.local import write_check
from distlion.local.period import LocalPeriod
from distlion.local.write_check import WriteCheck
from drawn import make_params
from local_runs import EVERY, SHAPES, make_sgd, train
from tiers import in_tiers

SIZES = {"matrix": (100, 30), "bias": (200,), "number": (), "nothing": (0, 3)}
NAMES = ["matrix", "bias", "number", "turned", "short", "nan"]


def make() -> tuple[dict[str, Tensor], WriteCheck]:
    """Build parameters of two dtypes at the start of a period."""
    params: dict[str, Tensor] = {name: torch.randn(shape) for name, shape in SIZES.items()}
    params["turned"] = torch.randn(40, 70).t()
    params["short"] = torch.randn(300, dtype=torch.bfloat16)
    params["nan"] = torch.full((5,), float("nan"))
    starts = [param.to(torch.float32, copy=True) for param in params.values()]
    return params, WriteCheck(list(params.values()), starts)


def list_names(params: dict[str, Tensor], start: WriteCheck) -> list[str]:
    names = {id(param): name for name, param in params.items()}
    return [names[id(param)] for param in start.list_written()]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The parameters of which all values are compared."""
    params: list[Tensor] = []
    compare = write_check._is_at

    def count(param: Tensor, start: Tensor) -> bool:
        params.append(param)
        return compare(param, start)

    monkeypatch.setattr(write_check, "_is_at", count)
    return params


def test_nothing_was_written_to(compared: list[Tensor]) -> None:
    assert make()[1].list_written() == []
    assert not compared


SPREAD = [(64, 3, 3, 3), (32, 32, 1, 1), (1000, 1), (1, 1000), (200,), (64, 64), (3, 100_000)]
SPREAD += [(64, 3, 7, 7), (960, 1, 3, 3), (64, 4096), (768, 1024)]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(
    "shape",
    in_tiers([(shape,) for shape in SPREAD], lambda case: math.prod(case[0]) <= 5000),
    ids=str,
)
def test_samples_are_spread_over_all_of_a_tensor(shape: tuple[int, ...], is_turned: bool) -> None:
    param = torch.randn(shape)
    if is_turned:
        param = param.transpose(0, -1)
    memory = param.as_strided((param.numel(),), (1,))
    parts = [
        *memory.tensor_split(20),
        *(
            part
            for dim, size in enumerate(param.shape)
            for part in param.tensor_split(min(size, 20), dim)
        ),
    ]
    for part in parts:
        start = WriteCheck([param], [param.clone()])
        part.data.add_(1.0)
        assert start.list_written()


def test_a_tensor_with_gaps_in_memory_is_compared_as_a_whole(compared: list[Tensor]) -> None:
    param = torch.randn(100, 30)[:, ::2]
    start = WriteCheck([param], [param.clone()])
    param.data[7, 3] += 1
    assert start.list_written() == [param]
    assert len(compared) == 1


def test_a_smaller_tensor_is_sampled_in_full() -> None:
    param = torch.randn(7, 9)
    for element in range(param.numel()):
        start = WriteCheck([param], [param.clone()])
        param.data.view(-1)[element] += 1
        assert start.list_written() == [param]


def test_only_a_parameter_with_a_counted_write_is_compared(compared: list[Tensor]) -> None:
    params, start = make()
    params["bias"].add_(0)
    assert start.list_written() == []
    assert len(compared) == 1
    assert compared[0] is params["bias"]


def test_the_same_memory_in_another_dtype_is_found() -> None:
    param = torch.ones(40, dtype=torch.bfloat16)
    start = WriteCheck([param], [param.clone()])
    param.data = param.data.view(torch.float16)
    assert start.list_written() == [param]


def test_the_same_memory_in_another_order_is_found() -> None:
    param = torch.randn(40, 40)
    start = WriteCheck([param], [param.clone()])
    before = param._version, param.data_ptr()
    param.data = param.data.t()
    assert (param._version, param.data_ptr()) == before
    assert start.list_written() == [param]


@pytest.mark.parametrize("name", NAMES)
def test_a_counted_write_to_one_element_is_found(name: str) -> None:
    params, start = make()
    params[name][(0,) * params[name].dim()] = 7.0
    assert list_names(params, start) == [name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_exchanged", [False, True])
def test_a_write_that_is_not_counted_is_found(name: str, is_exchanged: bool) -> None:
    params, start = make()
    before = params[name]._version
    if is_exchanged:
        params[name].data = torch.full_like(params[name], 7.0)
    else:
        params[name].data.fill_(7.0)
    assert params[name]._version == before
    assert list_names(params, start) == [name]


def test_values_that_were_written_back_are_as_before() -> None:
    params, start = make()
    kept = params["matrix"].clone()
    params["matrix"].zero_()
    params["matrix"].copy_(kept)
    assert start.list_written() == []


def test_added_parameters_are_compared_with_their_own_start() -> None:
    params = [torch.zeros(300), torch.zeros(300)]
    period = LocalPeriod()
    period.know({params[0]: "first", params[1]: "second"})
    period.take([(params[0], torch.zeros(300))])
    period.take_added([(params[1], torch.zeros(300))])
    period.check_begin()
    assert period.find_problem([{"params": params}]) is None
    period.take([(params[0], torch.zeros(300))])
    period.take_added([(params[1], torch.zeros(300))])
    params[1].fill_(2.0)
    period.check_begin()
    assert "second was written to" in str(period.find_problem([{"params": params}]))


@pytest.mark.parametrize("options", [{}, {"outer_momentum": 0.9}])
def test_a_step_compares_all_values_only_after_a_write(
    options: dict[str, object], compared: list[Tensor]
) -> None:
    params = make_params(SHAPES)
    optimizer = distlion.LocalSteps(make_sgd(params.values()), every=EVERY, **options)
    train(optimizer, params.values(), 0, 0, 3 * EVERY)
    optimizer.vote()
    assert not compared
    with torch.no_grad():
        for param in params.values():
            param.mul_(1.0)
    train(optimizer, params.values(), 0, 3 * EVERY, 3 * EVERY + 1)
    assert compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_a_forward_pass_shortens_are_as_before(dtype: torch.dtype) -> None:
    start = torch.randn(50, 70)
    start[9] = 0.0
    embedding = torch.nn.Embedding(50, 70, _weight=start.to(dtype, copy=True), max_norm=1.0)
    begun = WriteCheck([embedding.weight], [start])
    embedding(torch.arange(10))
    assert embedding.weight[0].norm() < 1.1
    assert begun.list_written() == []
    with torch.no_grad():
        # In another direction; half of a small element would be within rounding.
        embedding.weight[4, start[4].abs().argmax()] *= 0.5
    assert begun.list_written() == [embedding.weight]


@pytest.mark.parametrize("write", [lambda p: p.mul_(1.5), lambda p: p.neg_(), lambda p: p.add_(1)])
def test_rows_that_were_written_otherwise_are_found(write: Callable[[Tensor], object]) -> None:
    param = torch.randn(5, 70)
    begun = WriteCheck([param], [param.clone()])
    write(param[2])
    assert begun.list_written() == [param]
