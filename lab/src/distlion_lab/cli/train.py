"""``distlion train``: train a model with workers that vote, and account for every byte."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console

from distlion.errors import InvalidArgumentError
from distlion.votes import SCALED_RULES
from distlion.wire import PATTERNS
from distlion_lab.cli.beside import read_beside, train_beside
from distlion_lab.cli.failure import is_first_rank, leave_torchrun, shown_failures
from distlion_lab.cli.options import (
    ALPHA,
    BATCH_SIZE,
    DATA,
    MODEL_CONFIG,
    PARTITION,
    SCHEDULE,
    STEPS,
    TASK,
    TOKENIZER,
    choice,
    flag,
    name_new_folder,
    number,
    taking,
    whole,
)
from distlion_lab.cli.quantity import read_seconds
from distlion_lab.cli.race import read_race
from distlion_lab.cli.training_run import Runs, show_record
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.methods import RULE_NAMES
from distlion_lab.training.train_settings import (
    DEFAULT_RULE,
    OnDisagreement,
    Overlap,
    TrainSettings,
    torchrun_world_size,
)
from distlion_lab.training.workers import AUTO

EXAMPLE = "Example: distlion train --task text --workers 4 --steps 200 --data my_text.txt"
_RUNS = Path("runs")


class WorldChangeName(str, Enum):
    """Values of ``--on-world-change``."""

    MAP = "map"
    MEAN = "mean"
    RESET = "reset"


@taking(
    task=TASK,
    workers=whole("Local worker processes.", "4; under torchrun, its world size"),
    rule=choice(
        str,
        f"Aggregation rule, one of {', '.join(RULE_NAMES)}. P is 1 to 8 bits, at most 2 for "
        "feedback; cautious masks elements whose direction and gradient differ in sign; A and B "
        "are digits of betas: majority-betas-90-95 has (0.9, 0.95). Baselines: "
        "global-* is an fp32 all-reduce of gradients; ddp-* are PyTorch's hooks, then Lion; "
        "terngrad and graddrop are followed by AdamW. With --every, one of "
        f"{', '.join(SCALED_RULES)}.",
        f"{DEFAULT_RULE}; with --every scaled",
        metavar="NAME",
    ),
    exchange=choice(
        str,
        f"Exchange pattern of votes: {AUTO}, {', '.join(PATTERNS)}.",
        default=AUTO,
        metavar="NAME",
    ),
    overlap=choice(
        Overlap,
        "Send votes during backward; auto tries both and keeps the faster one.",
        default=Overlap.OFF,
    ),
    momentum_sync_every=whole(
        "Steps in which every momentum is averaged over workers once.", "never"
    ),
    every=whole(
        "Local steps of AdamW between votes, as in LocalSteps: for slow links.",
        "a vote in each step",
    ),
    diagnose_every=whole(
        "Steps between measurements of agreement among votes; draws diagnosis.png.", "never"
    ),
    on_disagreement=choice(
        OnDisagreement,
        "Treatment of workers far from the majority: warn, or exclude their votes. Needs "
        "--diagnose-every.",
        default=OnDisagreement.WARN,
    ),
    steps=STEPS,
    lr=number("Highest learning rate.", "by the rule"),
    weight_decay=number("Decoupled weight decay.", "by the rule"),
    schedule=SCHEDULE,
    warmup_steps=whole("Steps of linear warm-up.", "20"),
    batch_size=BATCH_SIZE,
    seed=whole("Seed of weights, data order and random tie-breaking.", default=0),
    threads=whole("Threads of one worker.", default=1),
    device=choice(
        str,
        "Device of the workers: cpu, cuda. For rules that vote.",
        default="cpu",
        metavar="NAME",
    ),
    oversubscribe=flag(
        "--oversubscribe",
        "Start more local workers than fit. The limits are 4 threads a core (4 workers always "
        "fit), and 256 MiB and 16 bytes a parameter of free memory for each, 34 with --every.",
    ),
    crew=flag(
        "--crew",
        "Form a crew of local workers: kill any of them, and watch the others train on and a "
        "newcomer take its place.",
    ),
    step_timeout=choice(
        str,
        "Time that a step waits for a silent worker: 60, 5min. For rules that vote.",
        "60",
        metavar="SECONDS",
    ),
    data=DATA,
    partition=PARTITION,
    alpha=ALPHA,
    tokenizer=TOKENIZER,
    model_config=MODEL_CONFIG,
    eval_every=whole("Steps between validations.", "50"),
    run_dir=choice(Path, "Folder for record and figure.", "a new one in runs"),
    checkpoint_every=whole(
        "Steps between checkpoints, in the run folder's checkpoints; the last step has one "
        "too. For rules that vote.",
        "none",
    ),
    keep_checkpoints=whole("Number of latest checkpoints to keep.", default=3),
    resume=flag(
        "--resume",
        "Continue from the latest checkpoint of --run-dir, or start from the beginning if "
        "there is none, as for the first start under torchrun --max-restarts.",
    ),
    on_world_change=choice(
        WorldChangeName,
        "Momenta at the start of a resumed run with another number of workers: the mean of "
        "each neighborhood, the mean of all, or zeros.",
        "refuse",
    ),
    beside=choice(
        str,
        "Another rule, such as global-adamw, to train afterwards on the same data and show "
        "side by side; its run goes to beside in the run folder.",
        "none",
        metavar="NAME",
    ),
    beside_lr=number("Highest learning rate of --beside.", "by the rule"),
    race=choice(
        str,
        "Rates of links between workers, such as 100mbit,1gbit, over which both runs of --beside "
        "race to one loss. As root, with distlion-netlab, 25 steps of each are timed over emulated "
        "links; otherwise seconds are computed from bytes.",
        "none",
        metavar="RATES",
    ),
    as_json=flag("--json", "Print the record without its series to standard output."),
)
def train_command(**given: Any) -> None:
    """Train a model from random weights, and show its results and their cost.

    By default it starts local workers; under torchrun it joins that world.

    The run folder gets record.json and loss.png.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        # All ranks have the same messages, but for failures.
        progress = messages if is_first_rank() else Console(stderr=True, quiet=True)
        settings = _read_settings(given)
        change = given["on_world_change"]
        checkpoints = CheckpointSettings(
            every=given["checkpoint_every"],
            keep=given["keep_checkpoints"],
            resume=given["resume"],
            on_world_change="raise" if change is None else change.value,
        )
        _check_folder(given["run_dir"], checkpoints)
        second = read_beside(settings, given)
        rates = read_race(given)
        folder = given["run_dir"] or _choose_run_dir(settings)
        runs = Runs(progress, oversubscribe=given["oversubscribe"], crew=given["crew"])
        record = runs.train(settings, folder, checkpoints)
        if record is not None:
            show_record(record, folder, as_json=given["as_json"])
            if second is not None:
                train_beside(runs, record, (settings, second), folder, rates)
    leave_torchrun()


def _read_settings(given: dict[str, Any]) -> TrainSettings:
    names = {field.name for field in dataclasses.fields(TrainSettings)}
    settings = {name: value for name, value in given.items() if name in names}
    if given["step_timeout"] is not None:
        settings["step_timeout_s"] = read_seconds("--step-timeout", given["step_timeout"])
    return TrainSettings.with_defaults(**settings)


def _check_folder(run_dir: Path | None, checkpoints: CheckpointSettings) -> None:
    """Refuse to invent a folder's name where workers, or a later start, must find the same one."""
    if run_dir is not None:
        return
    if checkpoints.resume:
        raise InvalidArgumentError("--resume needs the --run-dir of the run to continue")
    if checkpoints.every is not None and torchrun_world_size() is not None:
        raise InvalidArgumentError(
            "under torchrun, --checkpoint-every needs a --run-dir: one for all workers and restarts"
        )


def _choose_run_dir(settings: TrainSettings) -> Path:
    rule = settings.rule if settings.every is None else f"{settings.rule}-every-{settings.every}"
    return name_new_folder(_RUNS, f"{settings.task.value}-{rule}-{settings.workers}-workers")
