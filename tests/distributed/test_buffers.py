"""Buffers that are averaged: the mean, one result on all workers, and refusals that all share."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion import errors

pytestmark = pytest.mark.distributed

N = 3


class Odd(nn.Module):
    """Buffers of every kind: halves, doubles, complex, integers, booleans, empty, scalar."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.norm = nn.BatchNorm1d(5)
        self.norm(torch.randn(7 + rank, 5, generator=generator))
        for step in range(rank):
            self.norm(torch.randn(4, 5, generator=generator) + step)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
            name = str(dtype).replace("torch.", "of_")
            values = torch.randn(2, 3, generator=generator, dtype=torch.float64).to(dtype)
            self.register_buffer(name, values.t())
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(float(rank)), persistent=False)
        self.register_buffer("same", torch.tensor([0.1, float("nan"), float("inf")]))


def average_all(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Odd(rank)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    distlion.average_buffers(model)
    return before, dict(model.named_buffers())


def refuse(rank: int, world_size: int) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Average what does not fit, one kind of misfit after the other."""
    found = []
    for misfit in ("shape", "name", "number", "dtype", "sparse"):
        model = nn.BatchNorm1d(5)
        model.running_mean += rank
        if rank == 1:
            spoil(model, misfit)
        before = [buffer.clone() for buffer in model.buffers()]
        try:
            distlion.average_buffers(model)
        except errors.DistlionError as error:
            kept = all(
                a.is_sparse or torch.equal(a, b)
                for a, b in zip(before, model.buffers(), strict=True)
            )
            culprits = getattr(error, "culprits", ())
            found.append((type(error).__name__, str(error), culprits, kept))
    # All are at the same place: what fits is averaged as ever.
    model = nn.BatchNorm1d(5)
    model.running_mean += rank
    distlion.average_buffers(model)
    assert torch.equal(model.running_mean, torch.full((5,), (world_size - 1) / 2))
    return found


def spoil(model: nn.Module, misfit: str) -> None:
    if misfit == "shape":
        model.running_mean = torch.zeros(6)
    elif misfit == "name":
        model.register_buffer("later", model._buffers.pop("running_var"))
    elif misfit == "number":
        model.register_buffer("more", torch.zeros(1))
    elif misfit == "dtype":
        model.running_var = model.running_var.double()
    else:
        model.running_var = torch.eye(5).to_sparse()


def play(rank: int, world_size: int) -> tuple:
    return average_all(rank, world_size), refuse(rank, world_size)


@functools.cache
def outcomes() -> list[tuple]:
    return run_workers(play, N)


def test_buffers_are_the_mean_and_bitwise_identical_on_all_workers() -> None:
    befores = [outcome[0][0] for outcome in outcomes()]
    for name in befores[0]:
        after = [outcome[0][1][name] for outcome in outcomes()]
        raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in after]
        assert all(torch.equal(raw[0], each) for each in raw), name
        rows = [before[name] for before in befores]
        if name == "same":
            assert torch.equal(raw[0], rows[0].view(torch.uint8))
        elif rows[0].is_floating_point():
            mean = sum(row.double() for row in rows) / N
            assert torch.equal(after[0], mean.to(rows[0].dtype)), name
        elif not rows[0].is_complex():
            assert torch.equal(after[0], rows[0]), name


def test_workers_differed_before() -> None:
    befores = [outcome[0][0] for outcome in outcomes()]
    assert not torch.equal(befores[0]["norm.running_mean"], befores[1]["norm.running_mean"])
    assert befores[0]["norm.num_batches_tracked"] != befores[2]["norm.num_batches_tracked"]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (0, "running_mean (6,)"),
        (1, "running_var"),
        (2, "more (1,)"),
        (3, "torch.float64"),
        (4, "cannot be averaged: running_var torch.sparse_coo"),
    ],
)
def test_other_buffers_on_one_worker_are_one_refusal_on_all(index: int, said: str) -> None:
    for rank, outcome in enumerate(outcomes()):
        kind, message, culprits, kept = outcome[1][index]
        assert kept
        if index == 4 and rank == 1:
            assert kind == "UnsupportedTypeError"
            continue
        assert (kind, culprits) == ("ConfigMismatchError", (1,))
        assert said in message


def test_alone_nothing_changes() -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean += 1
    distlion.average_buffers(model)
    assert torch.equal(model.running_mean, torch.ones(3))
