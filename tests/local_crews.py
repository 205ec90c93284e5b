"""Crews of processes that take local steps; what must hold of them in the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlion
from crews import await_members, collect_log, draw_loss, make_model
from distlion import faults
from distlion.crew import CrewLocalSteps

EVERY, GOAL = 4, 48
STRUCK_AT = 5
"""The vote that faults meet; local steps before it are from 20 to 23."""

Each = Callable[[CrewLocalSteps], None]
MakeInner = Callable[[nn.Module, float], Any]


def make_adamw(model: nn.Module, decay: float) -> torch.optim.Optimizer:
    """Make the inner optimizer of a member."""
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=decay)


def make_muon_and_adamw(model: nn.Module, decay: float) -> list[torch.optim.Optimizer]:
    """Make the inner optimizers of a member."""
    named = [*model.named_parameters()]
    return [
        torch.optim.Muon([each for each in named if each[1].ndim == 2], weight_decay=decay),
        torch.optim.AdamW([each for each in named if each[1].ndim != 2], weight_decay=decay),
    ]


def bits(tensors: Iterable[Tensor]) -> bytes:
    """Return the bits of tensors."""
    return b"".join(bytes(each.detach().numpy()) for each in tensors)


def own_bits(optimizer: CrewLocalSteps) -> bytes:
    """Return the bits of a member's own parameters, in the order of its common point."""
    return bits(param for param, _ in optimizer.list_pairs())


def copy_kept(optimizer: CrewLocalSteps) -> dict[str, list[Tensor]]:
    """Copy the state of the votes, by key."""
    entries = [*optimizer.outer_optimizer.state.values()]
    return {key: [entry[key].clone() for entry in entries] for key in entries[0]}


def connect(port: int) -> Any:
    """Connect with the store, through which workers of a test tell each other when to act."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]


def strike(store: Any, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop this process, and let the test know that it happened."""
    faults.disarm_all()
    store.set("pid", str(os.getpid()))
    store.add("struck", 1)
    os.kill(os.getpid(), how)


IN_A_HURRY = {
    "timeouts": distlion.Timeouts(step_s=4),
    "replicas": distlion.Replicas(check_every=3),
}


def train(
    crew: distlion.Crew,
    *,
    seed: int,
    size: int = 3,
    goal: int = GOAL,
    each: Each = lambda optimizer: None,
    has_last_vote: bool = False,
    decay: float = 0.01,
    schedules: bool = True,
    make_inner: MakeInner = make_adamw,
    **options: Any,
) -> dict[str, Any]:
    """Train to the goal; return the common point after each vote, and what there is at the end.

    Args:
        crew: The crew.
        seed: Of the weights, which differ: those of the most advanced worker count.
        size: Members with whom the third period is taken: some may be slow to start.
        goal: Local steps.
        each: Called before each local step.
        has_last_vote: Whether to vote out of turn at the end.
        decay: Weight decay of the inner optimizer.
        schedules: Whether there is a scheduler, which newcomers take.
        make_inner: Makes the inner optimizer of a model, with a weight decay.
        **options: Of the optimizer.
    """
    model, said = make_model(seed), collect_log()
    points: dict[int, bytes] = {}
    rosters: dict[int, tuple[int, tuple[int, ...]]] = {}

    def note(optimizer: CrewLocalSteps) -> None:
        step = optimizer.committed_step
        points[step] = bits(optimizer.common_point)
        rosters[step] = crew.epoch.number, crew.epoch.roster.ids
        assert own_bits(optimizer) == points[step]

    def vote_out_of_turn(optimizer: CrewLocalSteps) -> None:
        each(optimizer)
        optimizer.vote()
        note(optimizer)
        assert own_bits(optimizer) == points[optimizer.committed_step]

    with crew:
        chosen = {"every": EVERY, "exchange": distlion.AllReduce(), **IN_A_HURRY, **options}
        optimizer, scheduler = crew.local_steps(make_inner(model, decay), **chosen), None
        if schedules:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
            crew.carry(scheduler=scheduler)
        while optimizer.local_step < goal:
            each(optimizer)
            await_members(crew, size if optimizer.committed_step == 1 else 0)
            draw_loss(model, optimizer.local_step, crew.id).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            if optimizer.steps_since_vote == 0:
                note(optimizer)
        if has_last_vote:
            vote_out_of_turn(optimizer)
    return {
        "points": points,
        "rosters": rosters,
        "id": crew.id,
        "seed": seed,
        "counts": (optimizer.local_step, optimizer.committed_step),
        "rates": [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups],
        "momentum": bits(optimizer.outer_buffers),
        "own": bits(model.parameters()),
        "kept": copy_kept(optimizer),
        "said": said,
        "formed": [line for line in said if line.startswith("epoch ")],
    }


def check_equal(results: list[dict[str, Any]]) -> None:
    """Check that no vote has two outcomes, and that all came to the same end."""
    seen: dict[int, set[Any]] = {}
    for result in results:
        for vote, point in result["points"].items():
            seen.setdefault(vote, set()).add((point, result["rosters"][vote]))
    assert all(len(found) == 1 for found in seen.values()), {
        vote: [roster for _, roster in found] for vote, found in seen.items() if len(found) > 1
    }
    for name in ("counts", "momentum"):
        assert len({result[name] for result in results}) == 1, name
    assert len({tuple(result["rates"]) for result in results}) == 1
