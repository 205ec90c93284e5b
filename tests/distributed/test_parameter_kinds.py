"""Parameters of every kind: tied, frozen, strided, expanded, of half precision."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import distlion
import oracle
from cluster import run_workers
from replay import (
    Case,
    Outcome,
    assert_all_equal,
    initial_values,
    play_oracle,
    simple_case,
    worker_grads,
)

pytestmark = pytest.mark.distributed


class Tied(torch.nn.Module):
    """Output weights are the input weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.out = torch.nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight


def train_tied(rank: int, world_size: int) -> tuple[int, np.ndarray]:
    torch.manual_seed(rank)
    model = Tied()
    optimizer = distlion.DistributedLion(
        model.parameters(), lr=1e-2, aggregation=distlion.TernaryVote()
    )
    for step in range(5):
        optimizer.zero_grad()
        model.out(model.embed(torch.tensor([rank, step]))).pow(2).sum().backward()
        optimizer.step()
    assert model.out.weight is model.embed.weight
    return len(optimizer.state), model.embed.weight.detach().numpy().copy()


def test_tied_weights_vote_once_and_stay_tied() -> None:
    outcomes = run_workers(train_tied, 3)
    assert [n for n, _ in outcomes] == [1, 1, 1]
    assert all(np.array_equal(weights, outcomes[0][1]) for _, weights in outcomes)


KINDS_OF_MEMORY = ("contiguous", "transposed", "every second")


def strided(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the same values, in the same order of coordinates, in another layout of memory."""
    if kind == "transposed":
        return value.t().contiguous().t()
    if kind == "every second":
        return torch.stack([value, value], dim=-1)[..., 0]
    assert kind == "contiguous"
    return value


def train_strided(rank: int, param_kind: str, grad_kind: str) -> np.ndarray:
    value = torch.from_numpy(oracle.values(3, n=35 * 9)).reshape(35, 9)
    p = torch.nn.Parameter(strided(value, param_kind))
    assert p.is_contiguous() == (param_kind == "contiguous")
    stride, pointer = p.stride(), p.data_ptr()
    optimizer = distlion.DistributedLion([p], lr=1e-2, weight_decay=0.1)
    for step in range(6):
        grad = strided(
            torch.from_numpy(oracle.gradient(3, step, rank, 0, 35 * 9)).reshape(35, 9), grad_kind
        )
        p.grad = grad
        kept = grad.clone()
        optimizer.step()
        assert torch.equal(grad, kept), "a gradient was changed"
    assert (p.stride(), p.data_ptr()) == (stride, pointer), "the parameter moved in memory"
    return p.detach().numpy().copy()


def train_all_strided(rank: int, world_size: int) -> dict[tuple[str, str], np.ndarray]:
    kinds = itertools.product(KINDS_OF_MEMORY, repeat=2)
    return {(param, grad): train_strided(rank, param, grad) for param, grad in kinds}


@functools.cache
def strided_outcomes() -> list[dict[tuple[str, str], np.ndarray]]:
    return run_workers(train_all_strided, 2)


@pytest.mark.parametrize("grad_kind", KINDS_OF_MEMORY)
@pytest.mark.parametrize("param_kind", KINDS_OF_MEMORY)
def test_layout_in_memory_changes_no_bit(param_kind: str, grad_kind: str) -> None:
    expected = strided_outcomes()[0]["contiguous", "contiguous"]
    for outcomes in strided_outcomes():
        assert np.array_equal(outcomes[param_kind, grad_kind], expected)


def train_one_of_a_column(
    rank: int, world_size: int, folder: str
) -> tuple[list[float], list[float], list[float]]:
    """Train one element with a stride, beside a frozen one and a buffer of the same kind."""
    columns = [torch.full((2, 4), rank + 1.0, dtype=torch.float64)[:1, 0] for _ in range(3)]
    trained = columns[0].float().as_strided((1,), (4,))
    assert trained.is_contiguous() and trained.stride() == (4,)
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(trained)
    model.frozen = torch.nn.Parameter(columns[1], requires_grad=False)
    model.register_buffer("column", columns[2])
    optimizer = distlion.DistributedLion(model.parameters(), lr=0.5)
    model.trained.grad = torch.ones(2, 4)[:1, 0]
    optimizer.step()
    optimizer.verify_replicas()
    distlion.average_buffers(model)
    saved = [tensor.clone() for tensor in model.state_dict().values()]
    distlion.save_checkpoint(folder, model, optimizer, extra=torch.ones(2, 4)[:1, 0])
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    extra = distlion.load_checkpoint(folder, model, optimizer).extra
    return (
        [float(tensor) for tensor in model.state_dict().values()],
        [float(tensor) for tensor in saved],
        extra.tolist(),
    )


def test_one_element_with_a_stride_trains_is_compared_and_saved(tmp_path: Path) -> None:
    for found, saved, extra in run_workers(train_one_of_a_column, 2, str(tmp_path)):
        assert found == saved == [0.5, 1.0, 1.0]
        assert extra == [1.0]


def train_with_expanded_gradient(rank: int, world_size: int) -> np.ndarray:
    p = torch.nn.Parameter(torch.zeros(70))
    optimizer = distlion.DistributedLion([p], lr=0.5, aggregation=distlion.TernaryVote())
    p.grad = torch.tensor(rank + 1.0).expand(70)
    optimizer.step()
    return p.detach().numpy().copy()


def test_expanded_gradient_votes_at_every_coordinate() -> None:
    for weights in run_workers(train_with_expanded_gradient, 2):
        assert np.array_equal(weights, np.full(70, -0.5, np.float32))


def train_with_gradients_of_inference(rank: int, world_size: int) -> np.ndarray:
    p = torch.nn.Parameter(torch.zeros(70))
    optimizer = distlion.DistributedLion([p], lr=0.5)
    for _ in range(2):
        with torch.inference_mode():
            p.grad = torch.full((70,), rank + 1.0)
        optimizer.step()
    return p.detach().numpy().copy()


def test_gradients_of_which_torch_counts_no_writes_vote() -> None:
    for weights in run_workers(train_with_gradients_of_inference, 2):
        assert np.array_equal(weights, np.full(70, -1.0, np.float32))


def train_beside_quantized(rank: int, world_size: int) -> list[list[float]]:
    inside = [torch.full((3,), 10.0 * rank + number) for number in range(2)]
    quantized = torch.nn.Parameter(TwoTensor(*inside), requires_grad=False)
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = distlion.DistributedLion([quantized, p], lr=0.5)
    p.grad = torch.ones(2)
    optimizer.step()
    return [tensor.tolist() for tensor in (quantized.a, quantized.b, p)]


def test_a_frozen_parameter_that_wraps_others_begins_as_that_of_rank_0() -> None:
    """As quantized weights beside adapters that are trained."""
    for found in run_workers(train_beside_quantized, 2):
        assert found == [[0.0] * 3, [1.0] * 3, [-0.5] * 2]


def train_half(rank: int, world_size: int) -> np.ndarray:
    p = torch.nn.Parameter(torch.ones(70, dtype=torch.float16))
    optimizer = distlion.DistributedLion(
        [p], lr=2.0**-6, precision=distlion.Precision(exp_avg=torch.float32)
    )
    for step in range(3):
        p.grad = torch.from_numpy(oracle.gradient(1, step, rank, 0, 70)).abs().add(0.01).half()
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    return p.detach().float().numpy()


def test_float16_parameters_train() -> None:
    for weights in run_workers(train_half, 3):
        assert np.array_equal(weights, np.full(70, 1 - 3 * 2.0**-6, np.float32))


def train_partly_frozen(rank: int, world_size: int, case: Case) -> Outcome:
    """A frozen parameter in front takes no coordinates: neither votes nor coins shift.

    It is made equal, then left alone.
    """
    frozen = torch.nn.Parameter(torch.full((500,), float(rank)), requires_grad=False)
    values = [torch.from_numpy(v if rank == 0 else v * 0) for v in initial_values(case)]
    params = [torch.nn.Parameter(v.reshape(()) if v.numel() == 1 else v) for v in values]
    spec = case.groups[0]
    optimizer = distlion.DistributedLion(
        [frozen, *params], lr=spec.lr, weight_decay=spec.weight_decay, seed=case.seed
    )
    for step in range(case.steps):
        for p, grad in zip(params, worker_grads(case, step, rank), strict=True):
            p.grad = None if grad is None else torch.from_numpy(grad).reshape(p.shape)
        optimizer.step()
    assert torch.equal(frozen, torch.zeros(500)), "a frozen parameter must be that of rank 0"
    return Outcome(
        [p.detach().reshape(-1).numpy().copy() for p in params],
        [optimizer.state[p]["exp_avg"].reshape(-1).numpy().copy() for p in params],
    )


def test_frozen_parameters_are_left_out() -> None:
    case = simple_case(steps=6)
    assert_all_equal(run_workers(train_partly_frozen, 3, case), play_oracle(case, 3))
