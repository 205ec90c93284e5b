"""A voting optimizer beside DistributedDataParallel, whose averaging is off."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import distlion
from cluster import run_workers
from distlion import errors
from distlion.integrations.ddp import disable_all_reduce
from failures import Caught, assert_all_raised, assert_raised, caught
from tiers import in_tiers

pytestmark = pytest.mark.distributed

STEPS = 3
WRAPPINGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
}


def make_model(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), *extra, nn.Tanh(), nn.Linear(13, 5))


def make_batch(step: int, rank: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    return torch.randn(4, 7, generator=generator)


def train(rank: int, wrapping: dict[str, bool] | None, *, accumulate: bool) -> list[Tensor]:
    """Train with overlap inside of DDP, or a bare model without (``wrapping`` None)."""
    bare = make_model()
    model: Any = bare
    if wrapping is not None:
        model = DistributedDataParallel(bare, **wrapping)
        disable_all_reduce(model)
    optimizer = distlion.DistributedLion(
        bare.parameters(), lr=1e-2, overlap=wrapping is not None, bucket_elements=64
    )
    for step in range(STEPS):
        if accumulate:
            with ExitStack() as stack:
                stack.enter_context(optimizer.no_sync())
                if wrapping is not None:
                    stack.enter_context(model.no_sync())
                model(make_batch(step, rank, part=1)).square().mean().backward()
        model(make_batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.committed_step == STEPS
    return [param.detach() for param in bare.parameters()]


def compare_wrappings(rank: int, world_size: int, accumulate: bool) -> dict[str, bool]:
    expected = train(rank, None, accumulate=accumulate)
    return {
        name: all(map(torch.equal, train(rank, wrapping, accumulate=accumulate), expected))
        for name, wrapping in WRAPPINGS.items()
    }


@pytest.mark.parametrize(
    "accumulate", in_tiers([False, True], bool), ids=["each pass", "accumulating"]
)
def test_overlap_inside_of_ddp_has_the_bits_of_a_bare_model(accumulate: bool) -> None:
    for found in run_workers(compare_wrappings, 2, accumulate):
        assert found == dict.fromkeys(WRAPPINGS, True)


def list_buffers(rank: int, disable: bool) -> list[Tensor]:
    """Run training and evaluation passes without a step; ranks have data of their own."""
    bare = make_model(nn.BatchNorm1d(13))
    model = DistributedDataParallel(bare)
    if disable:
        disable_all_reduce(model)
    seen = []
    for step in range(4):
        model(make_batch(step, rank)).square().mean().backward()
        seen += [buffer.clone() for buffer in bare.buffers()]
        if step % 2:
            with torch.no_grad():
                model.eval()(make_batch(step, rank, part=1))
                model.train()(make_batch(step, rank, part=2))
            seen += [buffer.clone() for buffer in bare.buffers()]
    return seen


def compare_buffers(rank: int, world_size: int) -> bool:
    return all(map(torch.equal, list_buffers(rank, True), list_buffers(rank, False)))


def test_buffers_are_broadcast_as_ddp_does_with_its_averaging() -> None:
    assert run_workers(compare_buffers, 2) == [True, True]


def turn_on_again(rank: int, world_size: int) -> bool:
    bare, alone = make_model(), make_model()
    model = DistributedDataParallel(bare)
    disable_all_reduce(model)
    model.require_backward_grad_sync = True
    for one in (model, alone):
        one(make_batch(0, rank)).square().mean().backward()
    return all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(bare.parameters(), alone.parameters(), strict=True)
    )


def test_gradients_stay_local_where_a_trainer_turns_synchronization_on_again() -> None:
    assert run_workers(turn_on_again, 2) == [True, True]


def refuse(rank: int, world_size: int) -> dict[str, Caught | None]:
    static = DistributedDataParallel(make_model(), static_graph=True)
    mixed = DistributedDataParallel(make_model())
    # Its constructor needs an accelerator.
    mixed.mixed_precision = object()
    bare = make_model()
    named = list(bare.named_parameters())
    delayed = DistributedDataParallel(
        bare, delay_all_reduce_named_params=named[:1], param_to_hook_all_reduce=named[0][1]
    )
    hooked = DistributedDataParallel(make_model())
    hooked.register_comm_hook(None, fp16_compress_hook)
    models = {"static": static, "mixed": mixed, "delayed": delayed, "bare": make_model()}
    models["hooked"] = hooked
    return {
        name: caught(None, lambda model=model: disable_all_reduce(model))
        for name, model in models.items()
    }


def test_a_model_that_needs_its_all_reduce_is_refused_by_name() -> None:
    outcomes = run_workers(refuse, 2)
    for name, fragment in (
        ("static", "static_graph=True"),
        ("mixed", "mixed_precision"),
        ("delayed", "delay_all_reduce_named_params"),
        ("bare", "Sequential; expected DistributedDataParallel"),
        ("hooked", "has a communication hook already"),
    ):
        assert_all_raised(
            [found[name] for found in outcomes], errors.UnsupportedTypeError, fragment
        )
    assert_raised(outcomes[0]["static"], errors.UnsupportedTypeError, "without it")
