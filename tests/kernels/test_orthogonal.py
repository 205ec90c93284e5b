"""Orthogonalized directions of one worker: shapes, batches, and where their signs point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from distlion.kernels import (
    Coefficients,
    Segment,
    choose_kernels,
    matrix_shape,
    orthogonal,
    orthogonalize,
)
from distlion.kernels.orthogonal import orthogonalize_directions
from distlion.layout import fill_buckets, place_parameters
from drawn import draw

HYPER = Coefficients(0.9, 0.95, 1e-3, 0.0, orthogonalize=True)
BATCH_ATOL = 1e-5
"""A batch rounds its products otherwise: 7e-7 after five iterations, measured for 7 x 30."""


def make_segments(shapes: Sequence[tuple[int, ...]]) -> list[Segment]:
    """Make a bucket's segments: gradients and momenta of very different size."""
    generator = torch.Generator().manual_seed(0)
    names = [f"p{index}" for index in range(len(shapes))]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    slots = place_parameters(names, sizes)
    (bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=1, bucket_elements=1 << 20)
    return [
        Segment(
            slot,
            torch.zeros(shape),
            10.0**index * draw(shape, generator),
            10.0**index * draw(shape, generator),
            HYPER,
        )
        for index, (slot, shape) in enumerate(zip(bucket.slots, shapes, strict=True))
    ]


def direct(segments: Sequence[Segment]) -> list[Tensor]:
    kernels = choose_kernels(torch.device("cpu"))
    found = [each.grad for each in orthogonalize_directions(kernels, segments)]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def test_a_direction_on_a_cpu_does_not_depend_on_the_others_in_its_bucket() -> None:
    """Virtual workers, other buckets and overlap would otherwise vote differently."""
    segments = make_segments([(7, 30), (30, 7), (7, 30), (7, 5, 6), (7, 30)])
    together = direct(segments)
    for segment, found in zip(segments, together, strict=True):
        assert torch.equal(found, direct([segment])[0]), segment.slot.name


@pytest.mark.parametrize("shape", [(7, 30), (30, 7), (12, 12)])
def test_a_batch_orthogonalizes_each_matrix_by_itself(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.stack([100.0**index * draw(shape, generator) for index in range(4)])
    for matrix, found in zip(batch, orthogonalize(batch), strict=True):
        assert torch.allclose(found, orthogonalize(matrix), rtol=0, atol=BATCH_ATOL)


def test_a_callers_autocast_changes_no_bit() -> None:
    """With overlap votes are encoded on another thread, where it is off."""
    matrix = draw((7, 30), torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = orthogonalize(matrix)
    assert torch.equal(found, orthogonalize(matrix))


@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_singular_values_follow_the_quintic_from_the_frobenius_norm(shape: tuple[int, int]) -> None:
    """Of a matrix with known singular vectors, in double: the scalar iteration, value by value."""
    generator = torch.Generator().manual_seed(2)
    left, _, right = torch.linalg.svd(draw(shape, generator).double(), full_matrices=False)
    values = torch.tensor([3.0, 0.5, 0.01], dtype=torch.float64)
    expected = values / values.square().sum().sqrt()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    found = orthogonalize((left * values) @ right)
    assert torch.allclose(found, (left * expected) @ right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 6), (4, 6)),
        ((4, 3, 2), (4, 6)),
        ((4, 3, 1, 2), (4, 6)),
        ((2, 3, 4, 5, 6), (2, 360)),
        ((4,), None),
        ((1, 6), None),
        ((6, 1, 1, 1), None),
    ],
)
def test_a_convolution_is_a_row_for_each_output(
    shape: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    assert matrix_shape(shape) == expected


def step_lion(param: nn.Parameter, grads: Sequence[Tensor]) -> Tensor:
    optimizer = distlion.Lion([{"params": [param], "orthogonalize": True}], lr=1.0)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach()


def test_a_convolution_moves_as_the_matrix_that_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    grads = [draw((6, 5, 3, 3), generator) for _ in range(4)]
    conv = step_lion(nn.Conv2d(5, 6, 3).weight.detach().zero_().requires_grad_(), grads)
    matrix = step_lion(nn.Parameter(torch.zeros(6, 45)), [grad.view(6, 45) for grad in grads])
    assert torch.equal(conv.view(6, 45), matrix)


@pytest.mark.parametrize("is_grad_transposed", [False, True])
def test_a_transposed_parameter_is_the_matrix_of_its_shape(is_grad_transposed: bool) -> None:
    """Its memory holds columns one after the other; its direction is still rows by columns."""
    generator = torch.Generator().manual_seed(4)
    grads = [draw((5, 9), generator) for _ in range(4)]
    plain = step_lion(nn.Parameter(torch.zeros(5, 9)), grads)
    given = [grad.t().contiguous().t() for grad in grads] if is_grad_transposed else grads
    assert torch.equal(step_lion(nn.Parameter(torch.zeros(9, 5).t()), given), plain)


# The signs of an orthogonal factor may point uphill.

BY_QUINTIC = ((16.0, 20.0), (22.0, 27.0))
"""No smaller 2 x 2 matrix of integers does it; the exact factor of no 2 x 2 matrix does."""
BY_BOTH = ((-5.0, -5.0, 6.0, -1.0), (-5.0, -6.0, 5.0, -1.0), (-6.0, -5.0, 5.0, -1.0))


def find_polar_factor(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right


@pytest.mark.parametrize("lr", [1e-6, 1e-2, 10.0])
def test_a_linear_loss_may_rise_along_the_vote_of_a_single_worker(lr: float) -> None:
    """The loss is <g, x>: its gradient is g everywhere, and no rate is small enough."""
    grad = torch.tensor(BY_QUINTIC)
    param = nn.Parameter(torch.zeros(2, 2))
    optimizer = distlion.Lion([{"params": [param], "orthogonalize": True}], lr=lr)
    for step in range(1, 4):
        param.grad = grad
        optimizer.step()
        loss = (grad.double() * param.detach().double()).sum().item()
        assert loss == pytest.approx(step * lr * 1.0, rel=1e-6)
    # The direction itself points downhill: only its signs do not.
    assert (grad * orthogonalize(grad)).sum() > 0


def test_signs_of_the_exact_factor_may_point_uphill_too() -> None:
    grad = torch.tensor(BY_BOTH)
    factor = find_polar_factor(grad)
    assert factor.abs().min() > 1e-3  # no sign of a rounding error
    assert (grad * factor).sum() > 0
    for found in (factor, orthogonalize(grad)):
        assert (grad * found.sign()).sum() == -9.0


def test_signs_of_the_exact_factor_of_two_by_two_never_point_uphill() -> None:
    values = torch.arange(-9.0, 10.0, dtype=torch.float64)
    matrices = torch.cartesian_prod(*[values] * 4).view(-1, 2, 2)
    matrices = matrices[torch.linalg.det(matrices).abs() > 0.5]
    factors = find_polar_factor(matrices)
    signs = factors.masked_fill(factors.abs() < 1e-9, 0.0).sign()
    assert ((matrices * signs).sum((-2, -1)) > 0).all()


class NoMemoryError(Exception):
    """Stands for an allocation that fails."""


def take_matrix_step(form: str, prepare: Callable[[], None]) -> list[Tensor]:
    """Do a step with two matrices among plain parameters; return all that it may write.

    Args:
        form: Name of the optimizer.
        prepare: Is called right before the step.
    """
    params = [nn.Parameter(torch.ones(shape)) for shape in ((3,), (4, 5), (6, 2), (2,))]
    groups = [
        {"params": [params[0], params[3]]},
        {"params": params[1:3], "orthogonalize": True},
    ]
    options = {"workers": 1} if form == "VirtualCluster" else {}
    optimizer = getattr(distlion, form)(groups, lr=0.25, **options)
    for param in params:
        param.grad = torch.linspace(-1, 1, param.numel()).view(param.shape)
    if form == "VirtualCluster":
        optimizer.collect(0)
    prepare()
    with suppress(NoMemoryError):
        optimizer.step()
    momenta = [optimizer.state[param]["exp_avg"] for param in params]
    return [each.detach().flatten() for each in (*params, *momenta)]


@pytest.mark.parametrize("form", ["Lion", "DistributedLion", "VirtualCluster"])
@pytest.mark.parametrize("name", ["orthogonalize", "_make_packed"])
def test_a_step_without_memory_for_a_matrix_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    called = getattr(orthogonal, name)
    calls, fails_at = 0, -1

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise NoMemoryError
        return called(*args, **options)

    def watch() -> None:
        nonlocal calls
        calls = 0
        monkeypatch.setattr(orthogonal, name, call)

    moved, n_calls = take_matrix_step(form, watch), calls
    assert n_calls >= 2
    for fails_at in range(1, n_calls + 1):
        for before, after in zip(start(), take_matrix_step(form, watch), strict=True):
            assert torch.equal(before, after), fails_at
    assert not any(map(torch.equal, start(), moved))


def start() -> list[Tensor]:
    """Return what ``take_matrix_step`` begins with: parameters of 1, momenta of 0."""
    return [torch.full((n,), value) for value in (1.0, 0.0) for n in (3, 20, 12, 2)]
