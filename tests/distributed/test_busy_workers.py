"""A worker that runs and is elsewhere is waited for; one that is silent or lost is named."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import distlion
from cluster import run_workers
from distlion import errors
from distlion.wire import gloo
from failures import (
    assert_raised,
    caught,
    count_looks_as_time,
    give_time,
    make_optimizer,
    note_extensions,
    params_of,
    set_grads,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEP_S, BUSY_S = 2.0, 300.0
LIMITS: dict[str, Any] = {"timeouts": distlion.Timeouts(step_s=STEP_S, busy_s=BUSY_S)}
PATIENT: dict[str, Any] = {"timeouts": distlion.Timeouts(step_s=60.0, busy_s=6000.0)}
"""Limits of many looks: see ``count_looks_as_time``."""


def be_elsewhere(scene: str) -> None:
    """Evaluate, say, until another worker has gone on to wait past its deadline twice."""
    _get_default_store().wait([f"{scene}/extended 2"])


def train(
    rank: int, optimizer: Any, *, pause: Callable[[], None] = lambda: None, steps: int = 3
) -> list[bytes]:
    """Take steps; pause before the second one. Return the parameters."""
    for step in range(steps):
        if step == 1:
            pause()
        set_grads(optimizer, step, rank)
        optimizer.step()
    return [bytes(p.detach().numpy()) for p in params_of(optimizer)]


def overlapped(rank: int, *, pause: Callable[[], None], **limits: Any) -> list[bytes]:
    """Pause within a backward pass, when the votes on the last layers have left."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = distlion.DistributedLion(
        model.parameters(), lr=1e-2, overlap=True, bucket_elements=64, **limits
    )
    for step in range(3):
        hidden = model[0](torch.full((2, 16), 0.1 * (rank + 1)))
        if step == 1:
            hidden.register_hook(lambda grad: pause())
        model[1:](hidden).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bytes(p.detach().numpy()) for p in model.parameters()]


def plain(rank: int, *, pause: Callable[[], None], **options: Any) -> list[bytes]:
    return train(rank, make_optimizer(**options), pause=pause)


def local(rank: int, *, pause: Callable[[], None], **options: Any) -> list[bytes]:
    params = [nn.Parameter(torch.full((70,), 0.5))]
    inner = torch.optim.AdamW(params, lr=1e-2)
    return train(rank, distlion.LocalSteps(inner, every=1, **options), pause=pause)


def in_subgroup(rank: int, *, pause: Callable[[], None], **options: Any) -> list[bytes]:
    group = dist.new_group([0, 1])
    if rank > 1:
        return []
    return train(rank, make_optimizer(process_group=group, **options), pause=pause)


def saving(rank: int, *, pause: Callable[[], None], **options: Any) -> list[bytes]:
    """Pause before a save, and before buffers are averaged."""
    model = nn.BatchNorm1d(3)
    model(torch.full((4, 3), float(rank)) + torch.arange(4.0)[:, None])
    optimizer = distlion.DistributedLion(model.named_parameters(), lr=1e-2, **options)
    (folder,) = share([tempfile.mkdtemp(prefix="distlion-test-")] if rank == 0 else [""])
    pause()
    timeouts: distlion.Timeouts = options["timeouts"]
    distlion.average_buffers(model, timeout_s=timeouts.step_s, busy_timeout_s=timeouts.busy_s)
    distlion.save_checkpoint(folder, model, optimizer)
    assert model.running_mean is not None
    return [bytes(model.running_mean.numpy())]


def share(values: list[str]) -> list[str]:
    dist.broadcast_object_list(values, src=0)
    return values


SCENES = {each.__name__: each for each in (plain, overlapped, local, in_subgroup, saving)}
STRAIGHT = ("plain", "overlapped")
"""Scenes that are played without a pause too."""


def play_all(rank: int, world_size: int) -> dict[str, list[list[bytes]]]:
    """Train with a pause on rank 0, and without; return the parameters after both."""
    found, store = {}, _get_default_store()
    count_looks_as_time()
    for scene, play in SCENES.items():
        note_extensions(store, scene)

        def pause(scene: str = scene) -> None:
            if rank == 0:
                be_elsewhere(scene)

        found[scene] = [play(rank, pause=pause, **PATIENT)]
        if scene in STRAIGHT:
            found[scene].append(play(rank, pause=lambda: None, **PATIENT))
        dist.barrier()
    return found


def test_a_worker_that_is_busy_elsewhere_is_waited_for_and_changes_nothing() -> None:
    first, second, third = run_workers(play_all, 3, timeout_s=120)
    for scene, (paused, *straight) in first.items():
        assert paused and all(each == paused for each in straight), scene
        assert second[scene][0] == paused, scene
        assert third[scene][0] == ([] if scene == "in_subgroup" else paused), scene


class Never:
    """A transfer over a link that is broken."""

    def wait(self, timeout: object) -> None:
        raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        return False


def wait_on_a_broken_link(rank: int, world_size: int) -> Any:
    give_time()
    optimizer = make_optimizer(**LIMITS)
    begin = gloo.GlooTransfer._has_ended

    def has_ended(transfer: gloo.GlooTransfer) -> bool:
        transfer._work = Never()  # type: ignore[assignment]
        return begin(transfer)

    dist.barrier()
    gloo.GlooTransfer._has_ended = has_ended  # type: ignore[method-assign]
    set_grads(optimizer, 0, rank)
    return caught(optimizer, optimizer.step)


def test_where_all_wait_nobody_waits_for_the_busy_limit() -> None:
    for outcome in run_workers(wait_on_a_broken_link, 2, timeout_s=BUSY_S / 5):
        found = assert_raised(outcome, errors.StepTimeoutError, "does not answer")
        assert found.culprits == () and found.unchanged


def be_away_for_too_long(rank: int, world_size: int, folder: str) -> Any:
    give_time()
    count_looks_as_time()
    optimizer = make_optimizer(timeouts=distlion.Timeouts(step_s=60.0, busy_s=180.0))
    note_extensions(_get_default_store(), "away")
    set_grads(optimizer, 0, rank)
    dist.barrier()
    if rank == 0:
        be_elsewhere("away")
        _get_default_store().wait([f"failed/{other}" for other in range(1, world_size)])
    outcome = caught(optimizer, optimizer.step)
    _get_default_store().set(f"failed/{rank}", "")
    return outcome


def test_a_worker_that_is_busy_beyond_the_limit_is_named(tmp_path: Path) -> None:
    late, *others = run_workers(be_away_for_too_long, 3, str(tmp_path))
    for outcome in others:
        found = assert_raised(outcome, errors.StepTimeoutError, "rank 0 runs", "Timeouts.busy_s")
        assert found.culprits == (0,) and found.unchanged
    assert assert_raised(late, errors.StepTimeoutError, "gave it up").unchanged
