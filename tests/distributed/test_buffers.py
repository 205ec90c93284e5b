"""Buffers that are averaged: the mean, one result on all workers, and refusals that all share."""

from __future__ import annotations

import functools
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion import errors
from distlion.options import buffers
from distlion.transport import Gloo, Transfer

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


class Interrupting(nn.BatchNorm1d):
    """Its buffers are asked for when Ctrl-C is pressed."""

    def named_buffers(self, *args: object, **options: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return super().named_buffers(*args, **options)  # type: ignore[arg-type]


def average_pair_first(rank: int, world_size: int) -> tuple[float, bool]:
    """Average among two ranks, then among all; return a mean, and whether an interrupt came."""
    # As with a group that carries the memory of a device alone.
    buffers.carries_host_memory = lambda process_group: False  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pair = dist.new_group([0, 1])
    if rank < 2:
        distlion.average_buffers(nn.BatchNorm1d(5), pair, timeout_s=20)
    model = (Interrupting if rank == 1 else nn.BatchNorm1d)(5)
    model.running_mean += rank
    is_interrupted = False
    try:
        distlion.average_buffers(model, timeout_s=20)
    except KeyboardInterrupt:
        is_interrupted = True
    return float(model.running_mean[0]), is_interrupted


def test_calls_are_counted_by_group_and_an_interrupt_waits_for_the_end() -> None:
    found = run_workers(average_pair_first, N)
    assert found == [(1.0, rank == 1) for rank in range(N)]


def call_alone(rank: int, world_size: int, is_apart: bool) -> tuple[str, str]:
    """Call it on rank 0 alone, while rank 1 waits elsewhere."""
    buffers.carries_host_memory = lambda process_group: not is_apart  # type: ignore[assignment]
    store = dist.distributed_c10d._get_default_store()
    found = "", ""
    if rank == 0:
        try:
            distlion.average_buffers(nn.BatchNorm1d(5), timeout_s=1)
        except errors.DistlionError as error:
            found = type(error).__name__, str(error)
        store.set("over", "")
    store.wait(["over"])
    return found


@pytest.mark.parametrize(
    ("is_apart", "kind"), [(False, "StepTimeoutError"), (True, "ProcessGroupError")]
)
def test_a_rank_that_calls_alone_hears_what_every_rank_must_call(is_apart: bool, kind: str) -> None:
    found, text = run_workers(call_alone, 2, is_apart)[0]
    assert found == kind
    assert text.startswith("[rank 0] average_buffers(), which every rank must call within")
    assert "timeout_s=1: " in text
    assert "step" not in text and "optimizer" not in text


def swap(rank: int, world_size: int) -> str:
    optimizer = distlion.DistributedLion([nn.Parameter(torch.ones(3))], lr=0.1, step_timeout_s=9)
    try:
        if rank == 0:
            distlion.average_buffers(nn.BatchNorm1d(5), timeout_s=9)
        else:
            optimizer.step()
    except errors.StepMismatchError as error:
        return str(error)
    return ""


def test_one_rank_that_averages_while_another_one_steps_is_an_error_on_both() -> None:
    for text in run_workers(swap, 2):
        assert "average_buffers() on rank 0, but step 0 of optimizer 0 on rank 1" in text


def count_gathers(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Average buffers of several dtypes; return in how many gathers, and whether each is right."""
    begin, gathered, found = Gloo.all_gather, [], []

    def count(self: Gloo, out: Tensor, chunk: Tensor, *, step: int | None) -> Transfer:
        gathered.append(chunk.nbytes)
        return begin(self, out, chunk, step=step)

    Gloo.all_gather = count  # type: ignore[method-assign]
    for bytes_at_once in (1 << 20, 84, 1):
        buffers._BYTES_AT_ONCE = bytes_at_once
        gathered.clear()
        model = nn.Module()
        for number in range(20):
            dtype = (torch.float32, torch.float64, torch.bfloat16)[number % 3]
            model.register_buffer(f"of_{number}", torch.full((3,), number + rank, dtype=dtype))
        distlion.average_buffers(model)
        is_right = all(
            torch.equal(each, torch.full_like(each, number + (world_size - 1) / 2))
            for number, each in enumerate(model.buffers())
        )
        found.append((len(gathered) - 1, is_right))  # less the one that compares what they are
    return found


def test_buffers_travel_together_up_to_a_limit() -> None:
    # Three in a row take 12 + 24 + 6 bytes: 84 holds six of 20, and the last two are left.
    assert run_workers(count_gathers, 2) == [[(1, True), (4, True), (20, True)]] * 2


def test_alone_nothing_changes() -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean += 1
    distlion.average_buffers(model)
    assert torch.equal(model.running_mean, torch.ones(3))
