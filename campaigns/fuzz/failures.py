"""What one rank does otherwise than the others, and what happens to it: programs end with these."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import distlion
from distlion import faults
from fuzz.operations import cut_unless_refused, plain_step
from fuzz.players import Player, Rank
from fuzz.program import Setup
from fuzz.table import Args, Promise, draw_key, operation

Change = Callable[[Player, int], None]


def _set(key: str, value: Any) -> Change:
    def change(player: Player, number: int) -> None:
        player.optimizer.param_groups[0][key] = value

    return change


def _malform_gradient(player: Player, index: int) -> None:
    param = player.model.params[index]
    param.grad = torch.zeros_like(param)
    param.grad.data = param.new_zeros(param.numel() + 1)


def _malform_momentum(make: Callable[[Tensor], Any]) -> Change:
    def change(player: Player, index: int) -> None:
        state = player.optimizer.state[player.model.params[index]]
        state["exp_avg"] = make(state["exp_avg"])

    return change


def _lose_momentum(player: Player, index: int) -> None:
    del player.optimizer.state[player.model.params[index]]["exp_avg"]


def _cut(player: Player, index: int) -> None:
    with cut_unless_refused(player.model):
        pass


def _freeze(player: Player, index: int) -> None:
    player.model.params[index].requires_grad_(False)


CHANGES: dict[str, Change] = {
    "lr": _set("lr", 0.5),
    "lr, no number": _set("lr", "fast"),
    "lr, meta": _set("lr", torch.tensor(0.1, device="meta")),
    "lr, two": _set("lr", torch.tensor([0.1, 0.2], device="cpu")),
    "betas": _set("betas", (0.1, 0.2)),
    "betas, no pair": _set("betas", 0.9),
    "weight_decay": _set("weight_decay", 0.7),
    "aggregation": _set("aggregation", distlion.QuantizedVote(bits=5)),
    "aggregation, text": _set("aggregation", "majority"),
    "aggregation, nothing": _set("aggregation", None),
    "step": _set("step", 99),
    "step, text": _set("step", "abc"),
    "step, nothing": _set("step", None),
    "precision": _cut,
    "frozen": _freeze,
    "gradient": _malform_gradient,
    "momentum, longer": _malform_momentum(lambda each: each.new_zeros(each.numel() + 1)),
    "momentum, double": _malform_momentum(lambda each: each.double()),
    "momentum, meta": _malform_momentum(lambda each: each.to("meta")),
    "momentum, nothing": _malform_momentum(lambda each: None),
    "momentum, lost": _lose_momentum,
}
"""What one rank's step cannot be done with, or not together with those of others."""


def _draw_lopsided(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real or not setup.trained:
        return None
    return {
        "rank": random.randrange(setup.workers),
        "change": random.choice(list(CHANGES)),
        "param": random.choice(setup.trained),
        "key": draw_key(random),
    }


@operation(_draw_lopsided, Promise.REFUSED, is_last=True, weight=6)
def lopsided(player: Player, args: Args) -> None:
    """Let one rank change something, and all of them do a step."""

    def passes(worker: int) -> list[Any]:
        return [[torch.full_like(param, 0.5 + worker) for param in player.model.params]]

    def edit(worker: int) -> None:
        if worker == args["rank"] and args["change"] == "gradient":
            _malform_gradient(player, args["param"])

    if player.rank == args["rank"] and args["change"] != "gradient":
        CHANGES[args["change"]](player, args["param"])
    player.mark()
    player.step(passes, edit)


CALLS: dict[str, Callable[[Player, Args], Any]] = {
    "verify_replicas": lambda player, args: player.optimizer.verify_replicas(),  # type: ignore[attr-defined]
    "add_param_group": lambda player, args: player.optimizer.add_param_group(
        {"params": [("late", nn.Parameter(torch.zeros(3, dtype=torch.float32, device="cpu")))]}
    ),
    "load_state_dict": lambda player, args: player.optimizer.load_state_dict(
        player.optimizer.state_dict()
    ),
    "save_checkpoint": lambda player, args: distlion.save_checkpoint(
        player.folder / f"lonely-{args['key']}", player.model, player.optimizer
    ),
    "load_checkpoint": lambda player, args: distlion.load_checkpoint(
        player.folder / "none", player.model, player.optimizer
    ),
    "other optimizer": lambda player, args: None,
}


def _draw_call(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real:
        return None
    rank, call = random.randrange(setup.workers), random.choice(list(CALLS))
    return {"rank": rank, "call": call, "key": draw_key(random)}


@operation(_draw_call, Promise.REFUSED, is_last=True, weight=3)
def other_call(player: Player, args: Args) -> None:
    """Let one rank make another call than the others, who step."""
    other = None
    if args["call"] == "other optimizer":
        _, other = player.make_fresh(salt=3)
    if player.rank != args["rank"]:
        plain_step(player, args["key"])
    elif other is not None:
        other.step()
    else:
        CALLS[args["call"]](player, args)


class PlannedError(Exception):
    """What a fault raises on its victim."""


def _raise(subject: object) -> None:
    raise PlannedError("planned")


def _interrupt(subject: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _kill(subject: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _flip(subject: object) -> None:
    assert isinstance(subject, Tensor)
    subject[-1] ^= 4


FAULTS: dict[str, tuple[faults.Point, Callable[[object], None]]] = {
    "raise before": ("before_step", _raise),
    "raise after encoding": ("after_encode", _raise),
    "interrupt before": ("before_step", _interrupt),
    "interrupt after encoding": ("after_encode", _interrupt),
    "flip": ("framed", _flip),
    "kill": ("after_encode", _kill),
}


OUTSIDE_OF_STEPS = ("raise before", "interrupt before")
"""Those that strike where a rank is in its user's code."""


def _draw_fault(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real:
        return None
    fault = random.choice([*FAULTS] * 3 + ["flip"])
    rank = random.randrange(setup.workers)
    return {"victim": rank, "fault": fault, "key": draw_key(random)}


@operation(_draw_fault, Promise.ATOMIC, is_modelled=True, is_last=True, weight=2)
def fault(player: Player, args: Args) -> None:
    """Let a fault strike one rank in a step."""
    if isinstance(player, Rank) and args["victim"] == player.rank:
        point, action = FAULTS[args["fault"]]
        step = player.optimizer.committed_step
        faults.arm(rank=player.rank, step=step, point=point, action=action)
    plain_step(player, args["key"])


INTERRUPTED = "interrupted"
"""Name of the file that a rank leaves in its folder once its step has been interrupted."""


def _draw_late(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real:
        return None
    rank = random.randrange(setup.workers)
    return {"victim": rank, "key": draw_key(random)}


@operation(_draw_late, Promise.ATOMIC, is_modelled=True, is_last=True)
def interrupt(player: Player, args: Args) -> None:
    """Interrupt a rank that waits in its step for the others, who are asked only then."""
    if not isinstance(player, Rank) or args["victim"] != player.rank:
        plain_step(player, args["key"])
        return
    is_over = threading.Event()
    watch = threading.Thread(target=_interrupt_step, args=(player, is_over))
    watch.start()
    try:
        plain_step(player, args["key"])
    finally:
        is_over.set()
        watch.join()


def is_waiting(player: Rank) -> bool:
    """Whether a rank waits in a step for others."""
    assert isinstance(player.optimizer, distlion.DistributedLion)
    lifecycle = player.optimizer._session.lifecycle
    return (lifecycle._under_way or "").startswith("step") and bool(lifecycle._watch._waiting)


def _interrupt_step(player: Rank, is_over: threading.Event) -> None:
    """Interrupt a step once it waits for others; then leave a file that says so."""
    while not is_over.wait(0.001):
        if is_waiting(player):
            _interrupt(None)
            (player.folder / INTERRUPTED).touch()
            return
