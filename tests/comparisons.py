"""Settings and made-up records of comparisons, for tests that train nothing or next to nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distlion_lab.training.compare_settings import CompareSettings
from distlion_lab.training.run_settings import RunSettings
from distlion_lab.training.train_settings import PartitionName, Schedule, TaskName

TINY_GPT = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 8,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 1,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
STEPS = [0, 5, 10]
GRID = (5e-4, 1e-3, 2e-3)


def make_run(**changes: Any) -> RunSettings:
    """Return settings of a run on images."""
    fields: dict[str, Any] = {
        "task": TaskName.IMAGES,
        "data": None,
        "partition": PartitionName.EVEN,
        "alpha": None,
        "tokenizer": None,
        "model_config": None,
        "method": "majority",
        "workers": 3,
        "seed": 1,
        "lr": 0.01,
        "weight_decay": 0.0,
        "steps": 6,
        "schedule": Schedule.CONSTANT,
        "warmup_steps": 0,
        "batch_size": 2,
        "eval_every": 4,
        "device": "cpu",
    }
    return RunSettings(**fields | changes)


def make_text_comparison(folder: Path, **changes: Any) -> CompareSettings:
    """Return settings of a comparison on a text and with a model that take milliseconds."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} of a text to train on\n" for number in range(200)))
    config = folder / "config.json"
    config.write_text(json.dumps(TINY_GPT))
    fields: dict[str, Any] = {
        "methods": ("majority", "global-lion"),
        "workers": (1, 2),
        "seeds": 2,
        "lrs": 2,
        "steps": 4,
        "batch_size": 1,
        "data": str(text),
        "model_config": config,
    }
    return CompareSettings.with_defaults(TaskName.TEXT, **fields | changes)


def make_record(
    *,
    method: str = "majority",
    workers: int = 4,
    seed: int = 1,
    lr: float = 1e-3,
    test_loss: float = 1.0,
    test_accuracy: float = 0.5,
    bits: float = 1.0,
    diverged: bool = False,
    task: str = "images",
) -> dict[str, Any]:
    """Return a record whose curves fall (rise) in a straight line to the values given."""
    steps = STEPS[:2] if diverged else STEPS
    shares = [step / STEPS[-1] for step in steps]
    losses = [2.0 + share * (test_loss - 2.0) for share in shares]
    return {
        "format": 1,
        "settings": {"method": method, "workers": workers, "seed": seed, "lr": lr},
        "versions": {
            "distlion": "1.0",
            "torch": "2.13",
            "transformers": "5.0",
            "python": "3.12",
            "platform": "Linux",
        },
        "task": {"name": task, "data": "made-up data", "model_type": "vit"},
        "trainable_parameters": 1000,
        "diverged": {"step": 7, "message": "the loss is nan"} if diverged else None,
        "up_bits_per_parameter": bits,
        "down_bits_per_parameter": bits,
        "sent_bytes_per_step": 250.0 * bits,
        "rounds": 2,
        "parameters_sha256": "",
        "series": {
            "step": steps,
            "train_loss": [None, *losses[1:]],
            "validation_loss": [loss + 0.1 for loss in losses],
            "validation_accuracy": [0.1 for _ in shares],
            "test_loss": losses,
            "test_accuracy": [0.1 + share * (test_accuracy - 0.1) for share in shares],
            # Twice as much in the first half: no multiple of the steps.
            "sent_bytes": [250 * bits * (step + min(step, steps[-1] / 2)) for step in steps],
        },
        "timing": {"wall_s": 1.0, "compute_s": 0.02},
    }


KINDS = {"global-lion": ("full precision", 32.0), "terngrad": ("baseline", 2.0)}


def write_comparison(
    folder: Path,
    *,
    methods: tuple[str, ...] = ("majority", "global-lion", "terngrad"),
    workers: tuple[int, ...] = (4, 8),
    seeds: int = 3,
    task: str = "images",
    diverged: tuple[str, ...] = (),
    untunable: tuple[str, ...] = (),
) -> Path:
    """Write a made-up comparison: error rises by 10 from method to method, by 1 from seed to seed.

    ``diverged`` are methods of which seed 1 diverged, ``untunable`` those that diverged with every
    learning rate.
    """
    (folder / "runs").mkdir(parents=True)
    cells = []
    for number, method in enumerate(methods):
        for count in workers:
            shared = {"method": method, "workers": count, "task": task}
            shared["bits"] = KINDS.get(method, ("ours", 1.0))[1]
            tuning = [
                make_record(lr=lr, seed=0, diverged=method in untunable, **shared) for lr in GRID
            ]
            reported = [
                make_record(
                    seed=seed,
                    test_accuracy=0.9 - 0.1 * number - 0.01 * seed,
                    test_loss=0.5 + 0.1 * number + 0.01 * seed,
                    diverged=method in diverged and seed == 1,
                    **shared,
                )
                for seed in range(1, seeds + 1)
            ]
            cells.append(_write_cell(folder, tuning, [] if method in untunable else reported))
    settings = {"task": task, "methods": list(methods), "workers": list(workers), "seeds": seeds}
    (folder / "comparison.json").write_text(json.dumps(_make_index(settings, cells)))
    return folder


def _write_cell(
    folder: Path, tuning: list[dict[str, Any]], reported: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write the records of one method and number of workers; return their entry in the index."""
    names = []
    for number, record in enumerate([*tuning, *reported]):
        settings = record["settings"]
        part = f"lr{number}" if number < len(tuning) else f"{settings['seed']}"
        names.append(f"{settings['method']}-{settings['workers']}-{part}.json")
        (folder / "runs" / names[-1]).write_text(json.dumps(record))
    return {
        "method": tuning[0]["settings"]["method"],
        "workers": tuning[0]["settings"]["workers"],
        "grid": list(GRID),
        "tuning": [{"lr": lr, "run": names[place]} for place, lr in enumerate(GRID)],
        "lr": GRID[1] if reported else None,
        "runs": names[len(tuning) :],
    }


def _make_index(settings: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": 1,
        "settings": {
            **settings,
            "lrs": len(GRID),
            "lr_factor": 2.0,
            "steps": STEPS[-1],
            "tuning_steps": STEPS[-1],
            "batch_size": 8,
            "alpha": None,
        },
        "command": "distlion compare --task images",
        "tuning_seed": 0,
        "methods": {
            name: {
                "description": f"what {name} is",
                "definition": f"{name}()",
                "kind": KINDS.get(name, ("ours", 1.0))[0],
                "weight_decay": 0.1,
            }
            for name in settings["methods"]
        },
        "cells": cells,
    }
