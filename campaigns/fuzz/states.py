"""Saving, resuming, and states that must be refused."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import distlion
from distlion.errors import DistlionError
from fuzz.damage import DAMAGES, damage_checkpoint
from fuzz.players import Player, make_scheduler
from fuzz.program import Setup
from fuzz.table import Args, Promise, draw_key, operation

State = dict[str, Any]


class BrokenPromiseError(AssertionError):
    """What an operation found itself: the judge takes it for an error without a type."""


def through_file(value: Any) -> Any:
    """Write a state with torch and read it again, as plain data."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def save(player: Player, folder: Path) -> None:
    """Save everything into a folder."""
    distlion.save_checkpoint(folder, player.model, player.optimizer, player.scheduler).wait()


def load(player: Player, folder: Path, **options: Any) -> None:
    """Load everything from a folder."""
    distlion.load_checkpoint(folder, player.model, player.optimizer, player.scheduler, **options)


@contextmanager
def replaced(player: Player, salt: int = 1, **changes: Any) -> Iterator[None]:
    """Let a player hold a model and an optimizer made anew, and go back to its own at the end."""
    own = player.model, player.optimizer, player.scheduler
    try:
        take_fresh(player, salt=salt, **changes)
        yield
    finally:
        player.model, player.optimizer, player.scheduler = own


@contextmanager
def nothing_changed(player: Player) -> Iterator[None]:
    """Check that whoever is refused is as before."""
    before = player.snapshots()
    try:
        yield
    except DistlionError as error:
        pairs = zip(before, player.snapshots(), strict=True)
        changed = {key for old, new in pairs for key, _ in old.items() ^ new.items()}
        if changed:
            raise BrokenPromiseError(f"refused ({error}), and changed {sorted(changed)}") from error
        raise


def take_fresh(player: Player, *, salt: int = 1, **changes: Any) -> None:
    """Give a player a new model of other values, frozen as its own one is, and an optimizer."""
    model, optimizer = player.make_fresh(salt, **changes)
    for old, new in zip(player.model.params, model.params, strict=True):
        new.requires_grad_(old.requires_grad)
    model.salt = 0  # what is added later has the values that all others give it
    scheduler = make_scheduler(player.setup.scheduler, optimizer)
    player.model, player.optimizer, player.scheduler = model, optimizer, scheduler


# --- what must leave no trace


def _draw_resume(random: Random, setup: Setup) -> Args:
    return {
        "how": random.choice(("state_dict", "checkpoint")),
        "into": random.choice(("same", "fresh")),
        "key": draw_key(random),
    }


@operation(_draw_resume, weight=4)
def resume(player: Player, args: Args) -> None:
    """Save and load, into the same or a new optimizer: all goes on with the bits it would have."""
    if args["how"] == "checkpoint":
        folder = player.folder / f"run-{args['key']}"
        save(player, folder)
        if args["into"] == "fresh":
            take_fresh(player)
        load(player, folder)
        return
    saved = through_file(player.optimizer.state_dict())
    model = {name: value.clone() for name, value in player.model.state_dict().items()}
    schedule = None if player.scheduler is None else copy.deepcopy(player.scheduler.state_dict())
    if args["into"] == "fresh":
        take_fresh(player)
    player.model.load_state_dict(model)
    player.optimizer.load_state_dict(saved)
    if player.scheduler is not None:
        player.scheduler.load_state_dict(schedule)


@operation(lambda random, setup: {"key": draw_key(random)}, Promise.EITHER)
def share_folder(player: Player, args: Args) -> None:
    """Save into a folder, let another optimizer of equal layout save there too, and load it."""
    folder = player.folder / f"shared-{args['key']}"
    save(player, folder)
    saved = player.optimizer.state_dict()
    with replaced(player, salt=2):
        player.optimizer.load_state_dict(saved)
        save(player, folder)
    load(player, folder)


# --- states that do not fit


def _divide(player: Player, saved: State) -> State:
    """Move a parameter from one saved group into the one before."""
    groups = [{**group, "params": list(group["params"])} for group in saved["param_groups"]]
    for first, second in itertools.pairwise(groups):
        if len(second["params"]) > 1:
            first["params"].append(second["params"].pop(0))
            for group in (first, second):
                group.pop("param_names", None)
    return {**saved, "param_groups": groups}


def _save_foreign(kind: type[torch.optim.Optimizer], steps: int) -> Callable[..., State]:
    def make(player: Player, saved: State) -> State:
        twin, _ = player.make_fresh(salt=1)
        groups = [
            {"params": [twin.params[index] for index in indices]}
            for indices in (group["params"] for group in saved["param_groups"])
        ]
        with torch.device("cpu"):  # torch's own optimizers keep numbers on the default device
            optimizer = kind(groups, lr=1e-3)  # type: ignore[call-arg]
            for _ in range(steps):
                for param in twin.params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
        return optimizer.state_dict()

    return make


def _change_group(key: str, value: Any) -> Callable[..., State]:
    def change(player: Player, saved: State) -> State:
        first, *rest = saved["param_groups"]
        return {**saved, "param_groups": [{**first, key: value}, *rest]}

    return change


def _change_momentum(change: Callable[[Tensor], Any]) -> Callable[..., State]:
    def apply(player: Player, saved: State) -> State:
        index = max(key for key, entry in saved["state"].items() if "exp_avg" in entry)
        entry = saved["state"][index]
        changed = {**entry, "exp_avg": change(entry["exp_avg"])}
        return {**saved, "state": {**saved["state"], index: changed}}

    return apply


_OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}
FOREIGN: dict[str, Callable[[Player, State], Any]] = {
    **{
        f"{name}, {n}": _save_foreign(kind, n) for name, kind in _OPTIMIZERS.items() for n in (0, 1)
    },
    "division": _divide,
    "no state": lambda player, saved: None,
    "a list": lambda player, saved: [saved],
    "unhashable ids": _change_group("params", [[0]]),
    "ids of nobody": _change_group("params", ["a"]),
    "a group more": lambda player, saved: {
        **saved,
        "param_groups": [*saved["param_groups"], {**saved["param_groups"][0], "params": []}],
    },
    **{f"step {value}": _change_group("step", value) for value in ("abc", None, -3, 2.5, 2**70)},
    "lr": _change_group("lr", float("nan")),
    "lr text": _change_group("lr", "fast"),
    "betas": _change_group("betas", 0.9),
    "rule": _change_group("aggregation", "Nothing()"),
    "rule kind": _change_group("aggregation", 7),
    "worker": _change_group("worker", "17 of 99"),
    "momentum shape": _change_momentum(lambda exp_avg: exp_avg.new_zeros(exp_avg.numel() + 1)),
    "momentum kind": _change_momentum(lambda exp_avg: exp_avg.tolist()),
    "momentum dtype": _change_momentum(lambda exp_avg: exp_avg.int()),
    "no momentum": _change_momentum(lambda exp_avg: None),
}


def _draw_foreign(random: Random, setup: Setup) -> Args | None:
    kind = random.choice(list(FOREIGN))
    if kind == "division" and not any(len(sizes) > 1 for sizes in setup.sizes[1:]):
        return None
    if kind == "worker" and not setup.is_real:
        return None
    if kind == "ids of nobody" and len(setup.sizes[0]) == 1 and 0 in setup.frozen:
        return None  # a parameter without a state may have any id
    rank = random.choice((None, *range(setup.workers))) if setup.is_real else None
    return {"kind": kind, "rank": rank}


@operation(_draw_foreign, Promise.REFUSED, weight=4)
def load_foreign(player: Player, args: Args) -> None:
    """Load a state that does not fit, on all ranks or on one, where others load their own."""
    saved = player.optimizer.state_dict()
    if args["rank"] in (None, player.rank):
        saved = FOREIGN[args["kind"]](player, saved)
    player.optimizer.load_state_dict(saved)


def _draw_division(random: Random, setup: Setup) -> Args | None:
    long = [number for number, sizes in enumerate(setup.sizes) if number and len(sizes) > 1]
    return {"group": random.choice(long), "key": draw_key(random)} if long else None


@operation(_draw_division, Promise.REFUSED)
def load_divided(player: Player, args: Args) -> None:
    """Load a checkpoint into groups that divide the same parameters otherwise."""
    folder = player.folder / f"divided-{args['key']}"
    save(player, folder)
    sizes, group = list(player.setup.sizes), args["group"]
    sizes[group - 1], sizes[group] = (*sizes[group - 1], sizes[group][0]), sizes[group][1:]
    with replaced(player, sizes=tuple(sizes)), nothing_changed(player):
        load(player, folder)


def _draw_damage(random: Random, setup: Setup) -> Args | None:
    kind = random.choice(list(DAMAGES))
    if kind == "no estimate" and not any(
        setup.rules[group].startswith("feedback") for group in range(len(setup.rules))
    ):
        return None
    if kind == "schedule" and setup.scheduler not in ("lambda", "sequential"):
        return None  # others take over whatever they are given
    worker = random.randrange(setup.workers)
    return {"kind": kind, "key": draw_key(random), "worker": worker}


@operation(_draw_damage, Promise.REFUSED, weight=3)
def load_damaged(player: Player, args: Args) -> None:
    """Load a checkpoint that was damaged; or forged, with sums that fit."""
    folder = player.folder / f"damaged-{args['key']}"
    save(player, folder)
    player.barrier()
    if player.rank == 0:
        damage_checkpoint(folder, args["kind"], args["worker"])
    player.barrier()
    load(player, folder)


# --- other numbers of workers


def _draw_world(random: Random, setup: Setup) -> Args:
    rule = random.choice(("mean", "map", "reset", "raise"))
    return {"workers": random.choice((1, 2, 3, 4)), "rule": rule, "key": draw_key(random)}


def _promise_world(setup: Setup, args: Args) -> Promise:
    is_refused = args["rule"] == "raise" and args["workers"] != setup.workers
    return Promise.REFUSED if is_refused else Promise.OK


def expect_momentum(saved: Tensor, worker: int, workers: int, rule: str) -> Tensor:
    """Return what a worker begins with: the weighted sum in double, added in order."""
    n_saved, total = len(saved), torch.zeros_like(saved[0], dtype=torch.float64)
    if n_saved == workers:
        return saved[worker]
    width = Fraction(n_saved, workers)
    for number, momentum in enumerate(saved):
        inside = min((worker + 1) * width, number + 1) - max(worker * width, number)
        share = {"mean": Fraction(1, n_saved), "map": max(inside, Fraction(0)) / width}.get(rule)
        if share:
            total += momentum.double() * float(share)
    return total.to(saved.dtype)


@operation(_draw_world, _promise_world)
def change_world(player: Player, args: Args) -> None:
    """Save, and load into virtual workers of another number."""
    folder, n = player.folder / f"world-{args['key']}", args["workers"]
    save(player, folder)
    clusters = {}
    for workers in (player.setup.workers, n):
        other = player.as_virtual(workers)
        load(other, folder, on_world_change=args["rule"] if workers == n else "raise")
        clusters[workers] = other
    then, now = clusters[player.setup.workers], clusters[n]
    for index, (old, new) in enumerate(zip(then.model.params, now.model.params, strict=True)):
        if not old.requires_grad:
            continue
        saved, found = (p.optimizer.state[q]["exp_avg"] for p, q in ((then, old), (now, new)))
        for worker in range(n):
            expected = expect_momentum(saved, worker, n, args["rule"])
            if not torch.equal(found[worker], expected):
                raise BrokenPromiseError(f"momentum of p{index}, worker {worker}, after the load")
