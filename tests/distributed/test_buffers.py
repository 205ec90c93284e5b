"""Buffers made equal: means of running statistics, rank 0's others, refusals that all share."""

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
from distlion.step import buffers
from distlion.wire import Gloo
from distlion.wire.transport import Transfer

pytestmark = pytest.mark.distributed

N = 3


class Statistics(nn.Module):
    """A norm of one's own: it has running statistics, and derives from none of torch's."""

    def __init__(self, mean: Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("running_mean", mean, persistent=persistent)
        self.register_buffer("num_batches_tracked", torch.tensor(3))


class Moments(nn.Module):
    """A mean beside a mean of squares, of which only one has a name that is known."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        seen = torch.randn(6, generator=generator) * 3
        self.register_buffer("running_mean", seen.mean())
        self.register_buffer("running_square", (seen**2).mean())


class BatchScale(nn.BatchNorm1d):
    """A BatchNorm with a buffer more."""

    def __init__(self, rank: int) -> None:
        super().__init__(2)
        self.running_mean += rank
        self.register_buffer("limit", torch.tensor(float(rank)))


class Odd(nn.Module):
    """Buffers of every kind: halves, doubles, complex, integers, booleans, empty, scalar."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.norm = nn.BatchNorm1d(5)
        self.norm(torch.randn(7 + rank, 5, generator=generator))
        for step in range(rank):
            self.norm(torch.randn(4, 5, generator=generator) + step)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.instance(torch.randn(2, 4, 3, generator=generator))
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
            name = str(dtype).replace("torch.", "of_")
            values = torch.randn(2, 3, generator=generator, dtype=torch.float64).to(dtype)
            self.add_module(name, Statistics(values.t()))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.scalar = Statistics(torch.tensor(float(rank)), persistent=False)
        self.none = Statistics(torch.zeros(0, 3))
        self.same = Statistics(torch.tensor([0.1, float("nan"), float("inf")]))
        self.scale = BatchScale(rank)
        # Buffers without a mean.
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
            self.old_spectral = nn.utils.spectral_norm(nn.Linear(4, 3))
        signs = self.spectral.parametrizations.weight[0]._u, self.old_spectral.weight_u
        torch._foreach_mul_(signs, (-1) ** rank)
        self.register_buffer("projection", torch.randn(6, 6, generator=generator))
        self.register_buffer("of_complex", torch.randn(3, generator=generator) * 1j)
        self.moments = Moments(generator)


MEANS = {
    *("norm.running_mean", "norm.running_var", "instance.running_mean", "instance.running_var"),
    *("of_bfloat16.running_mean", "of_float16.running_mean", "of_float64.running_mean"),
    *("of_complex64.running_mean", "scalar.running_mean", "none.running_mean"),
    *("scale.running_mean", "scale.running_var"),
}
"""The buffers of ``Odd`` that become the mean of all workers'."""


def average_all(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Odd(rank)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    distlion.average_buffers(model)
    return before, dict(model.named_buffers())


def refuse(rank: int, world_size: int) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Average what does not fit, one kind of misfit after the other."""
    found = []
    for misfit in ("shape", "name", "number", "dtype", "sparse", "module", "expanded"):
        model = BatchScale(rank) if misfit == "module" else nn.BatchNorm1d(5)
        model.running_mean += rank
        if rank == 1:
            model = spoil(model, misfit)
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


def spoil(model: nn.Module, misfit: str) -> nn.Module:
    if misfit == "shape":
        model.running_mean = torch.zeros(6)
    elif misfit == "name":
        model.register_buffer("later", model._buffers.pop("running_var"))
    elif misfit == "number":
        model.register_buffer("more", torch.zeros(1))
    elif misfit == "dtype":
        model.running_var = model.running_var.double()
    elif misfit == "module":
        other = nn.Module()
        for name, buffer in model.named_buffers():
            other.register_buffer(name, buffer)
        return other
    elif misfit == "expanded":
        model.running_var = torch.ones(1).expand(5)
    else:
        model.running_var = torch.eye(5).to_sparse()
    return model


def play(rank: int, world_size: int) -> tuple:
    return average_all(rank, world_size), refuse(rank, world_size)


@functools.cache
def outcomes() -> list[tuple]:
    return run_workers(play, N)


def raw(buffer: Tensor) -> Tensor:
    return buffer.contiguous().reshape(-1).view(torch.uint8)


def test_running_statistics_become_the_mean_and_other_buffers_rank_0s() -> None:
    befores = [outcome[0][0] for outcome in outcomes()]
    assert befores[0].keys() >= MEANS
    for name in befores[0]:
        after = [outcome[0][1][name] for outcome in outcomes()]
        assert all(torch.equal(raw(after[0]), raw(each)) for each in after), name
        rows = [before[name] for before in befores]
        wide = torch.complex128 if rows[0].is_complex() else torch.float64
        mean = (sum(row.to(wide) for row in rows) / N).to(rows[0].dtype)
        expected = mean if name in MEANS else rows[0]
        assert torch.equal(raw(after[0]), raw(expected)), name


def test_workers_differed_before() -> None:
    befores = [outcome[0][0] for outcome in outcomes()]
    equal = {
        name
        for name, buffer in befores[0].items()
        if all(torch.equal(raw(buffer), raw(before[name])) for before in befores)
    }
    counted = {name for name in befores[0] if name.endswith("num_batches_tracked")}
    # BatchScale has seen no batch.
    constant = {"none.running_mean", "same.running_mean", "scale.running_var"}
    assert equal == constant | (counted - {"norm.num_batches_tracked"})


def test_a_spectral_norm_stays_one_of_unit_vectors_and_a_variance_stays_one() -> None:
    for outcome in outcomes():
        after = outcome[0][1]
        for name in ("spectral.parametrizations.weight.0._u", "old_spectral.weight_u"):
            assert float(after[name].norm()) == pytest.approx(1)
        assert after["moments.running_square"] >= after["moments.running_mean"] ** 2


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (0, "running_mean: (6,)"),
        (1, "running_var"),
        (2, "more: (1,)"),
        (3, "torch.float64"),
        (4, "torch.float32; cannot be averaged: torch.sparse_coo on rank 1"),
        (5, "running_mean: (2,) torch.float32; mean"),
    ],
)
def test_other_buffers_on_one_worker_are_one_refusal_on_all(index: int, said: str) -> None:
    for rank, outcome in enumerate(outcomes()):
        kind, message, culprits, kept = outcome[1][index]
        assert kept
        if index in (4, 6) and rank == 1:
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
            distlion.average_buffers(nn.BatchNorm1d(5), timeout_s=1, busy_timeout_s=1)
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
    assert text.startswith("[rank 0] average_buffers(), which every rank must call: ")
    assert "within 1" in text
    assert "step" not in text and "optimizer" not in text


def swap(rank: int, world_size: int) -> str:
    optimizer = distlion.DistributedLion(
        [nn.Parameter(torch.ones(3))], lr=0.1, timeouts=distlion.Timeouts(step_s=9)
    )
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
            statistics = nn.Module()
            values = torch.full((3,), number + rank, dtype=dtype)
            statistics.register_buffer("running_mean", values)
            model.add_module(f"of_{number}", statistics)
        distlion.average_buffers(model)
        is_right = all(
            torch.equal(each, torch.full_like(each, number + (world_size - 1) / 2))
            for number, each in enumerate(model.buffers())
        )
        # Less those that compare layouts, announce bits and compare them.
        found.append((len(gathered) - 3, is_right))
    gathered.clear()
    distlion.average_buffers(model)  # all are equal now
    return [*found, (len(gathered) - 2, True)]  # equal bits are announced only


def test_buffers_travel_together_up_to_a_limit() -> None:
    # Three in a row take 12 + 24 + 6 bytes: 84 holds six of 20, and the last two are left.
    # Equal ones do not travel.
    expected = [(1, True), (4, True), (20, True), (0, True)]
    assert run_workers(count_gathers, 2) == [expected] * 2


def test_alone_nothing_changes() -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean += 1
    distlion.average_buffers(model)
    assert torch.equal(model.running_mean, torch.ones(3))


def test_buffers_without_their_model_are_refused() -> None:
    with pytest.raises(
        errors.UnsupportedTypeError, match=r"a dict; expected the torch\.nn\.Module"
    ):
        distlion.average_buffers(dict(nn.BatchNorm1d(3).named_buffers()))  # type: ignore[arg-type]
