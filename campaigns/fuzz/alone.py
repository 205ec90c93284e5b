"""What one rank does while the others go on, as scripts do that save and evaluate on rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import distlion
from fuzz.failures import is_waiting
from fuzz.operations import make_data, plain_step
from fuzz.players import PAUSE_S, Player, Rank
from fuzz.program import Setup
from fuzz.table import Args, draw_key, operation


def _save(player: Player, args: Args) -> None:
    parts = (player.model, player.optimizer, player.scheduler)
    state = [part.state_dict() for part in parts if part is not None]
    torch.save(state, player.folder / f"alone-{args['key']}.pt")


@torch.no_grad()
def _evaluate(player: Player, args: Args) -> None:
    player.model.eval()
    player.model(make_data(args["key"]))
    player.model.train()


def _look(player: Player, args: Args) -> Any:
    optimizer = player.optimizer
    assert isinstance(optimizer, distlion.DistributedLion)
    return repr(optimizer), optimizer.traffic, optimizer.plan, optimizer.grad_norm


WORK: dict[str, Callable[[Player, Args], Any]] = {
    "torch.save": _save,
    "state_dict": lambda player, args: player.optimizer.state_dict(),
    "evaluate": _evaluate,
    "look": _look,
}


def _draw_alone(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real:
        return None
    rank, work = random.randrange(setup.workers), random.choice(list(WORK))
    return {"rank": rank, "call": work, "key": draw_key(random)}


@operation(_draw_alone, weight=2)
def alone(player: Player, args: Args) -> None:
    """Let one rank do what needs no other."""
    if player.rank == args["rank"]:
        WORK[args["call"]](player, args)


def _draw_pause(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real:
        return None
    return {"rank": random.randrange(setup.workers), "key": draw_key(random)}


@operation(_draw_pause, is_modelled=True, weight=0.5)
def pause(player: Player, args: Args) -> None:
    """Do a step to which one rank comes late: once another one has waited for it for some time."""
    if not isinstance(player, Rank):
        plain_step(player, args["key"])
        return
    note = player.folder / f"waited-{args['key']}"
    if player.rank == args["rank"]:
        while not note.exists():
            time.sleep(0.01)
        plain_step(player, args["key"])
        return
    is_over = threading.Event()
    watch = threading.Thread(target=_note_wait, args=(player, is_over, note))
    watch.start()
    try:
        plain_step(player, args["key"])
    finally:
        is_over.set()
        watch.join()
        note.touch()


def _note_wait(player: Rank, is_over: threading.Event, note: Path) -> None:
    """Leave a file once this rank's step has waited for others for some time."""
    since_s = None
    while not is_over.wait(0.01):
        if not is_waiting(player):
            continue
        since_s = since_s or time.monotonic()
        if time.monotonic() - since_s > PAUSE_S:
            note.touch()
            return
