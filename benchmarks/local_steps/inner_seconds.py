"""Seconds of a worker's step with each inner optimizer, in turns: computing needs no network."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import target_path  # noqa: F401
import torch.nn.functional as F
from arrivals import INNER_SECONDS, name_compute
from contest import DDP, INNERS, WORKERS, make_cell
from curves import Data
from inner_kinds import make_alone
from laboratory import save
from runs import RunConfig, Task
from schedule import DECAY_PER_STEP

from distlion_lab.training.workers import MethodRun
from distlion_netlab.sweep import read_conditions

_STEPS = 4
"""Steps of a repetition, as where the network lab times computing."""


def time_inners(folder: Path, data: Data, repetitions: int) -> Path:
    """Time a step of one worker on text with each inner optimizer; write and return the record."""
    cell = make_cell("text", DDP)
    config = cell.config(cell.center, 0, is_tuning=True)
    config = RunConfig(**{**vars(config), "workers": WORKERS})
    task, _ = data.build(config)
    turns = {name_compute(inner): _make_step(inner, config, task) for inner in INNERS}
    conditions = read_conditions()
    path = folder / INNER_SECONDS
    save(path, {"conditions": conditions, "seconds": take_turns(turns, repetitions)})
    return path


def _make_step(inner: str, config: RunConfig, task: Task) -> Callable[[], None]:
    """Return a function that takes a step with the first worker's examples."""
    model = task.build_model()
    run = MethodRun(
        params=list(model.named_parameters()),
        lr=config.lr,
        weight_decay=DECAY_PER_STEP / config.lr,
        workers=1,
        steps=config.steps,
        seed=config.seed,
    )
    optimizer = make_alone(inner, model, run)
    done = 0

    def step() -> None:
        nonlocal done
        inputs, targets = task.batches(done)[0]
        logits = model(inputs).flatten(0, -2)
        F.cross_entropy(logits, targets.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        done += 1

    return step


def take_turns(steps: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Return seconds of a step by name and repetition, after a turn that does not count."""
    names = [*steps]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-1, repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            for _ in range(_STEPS):
                steps[name]()
            took_s = round((time.perf_counter() - started) / _STEPS, 6)
            if repetition >= 0:
                seconds[name].append(took_s)
    return seconds
