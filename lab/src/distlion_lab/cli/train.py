"""``distlion train``: train a model with workers that vote, and account for every byte."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from distlion.errors import InvalidArgumentError
from distlion.votes import SCALED_RULES
from distlion.wire import PATTERNS
from distlion_lab.cli.beside import read_beside, train_beside
from distlion_lab.cli.failure import is_first_rank, leave_torchrun, shown_failures
from distlion_lab.cli.options import (
    Alpha,
    BatchSize,
    Data,
    ModelConfig,
    Partition,
    ScheduleOption,
    Steps,
    Task,
    TokenizerOption,
    name_new_folder,
)
from distlion_lab.cli.quantity import number_option, read_seconds, whole_option
from distlion_lab.cli.training_run import Runs, show_record
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.methods import RULE_NAMES
from distlion_lab.training.record import Record
from distlion_lab.training.train_settings import (
    DEFAULT_RULE,
    OnDisagreement,
    Overlap,
    Schedule,
    TaskName,
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


# The options, in the order of the help.
_Workers = Annotated[
    int | None,
    whole_option(help="Local worker processes.", show_default="4; under torchrun, its world size"),
]
_Rule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Aggregation rule, one of {', '.join(RULE_NAMES)}. P is 1 to 8 bits, at most 2 for "
        "feedback; cautious masks elements whose direction and gradient differ in sign; A and B "
        "are digits of betas: majority-betas-90-95 has (0.9, 0.95). Baselines: "
        "global-* is an fp32 all-reduce of gradients; ddp-* are PyTorch's hooks, then Lion; "
        "terngrad and graddrop are followed by AdamW. With --every, one of "
        f"{', '.join(SCALED_RULES)}.",
        show_default=f"{DEFAULT_RULE}; with --every scaled",
    ),
]
_Exchange = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Exchange pattern of votes: {AUTO}, {', '.join(PATTERNS)}."),
]
_Overlap = Annotated[
    Overlap,
    typer.Option(help="Send votes during backward; auto tries both and keeps the faster one."),
]
_SyncEvery = Annotated[
    int | None,
    whole_option(
        help="Steps in which every momentum is averaged over workers once.", show_default="never"
    ),
]
_Every = Annotated[
    int | None,
    whole_option(
        help="Local steps of AdamW between votes, as in LocalSteps: for slow links.",
        show_default="a vote in each step",
    ),
]
_DiagnoseEvery = Annotated[
    int | None,
    whole_option(
        help="Steps between measurements of agreement among votes; draws diagnosis.png.",
        show_default="never",
    ),
]
_OnDisagreement = Annotated[
    OnDisagreement,
    typer.Option(
        help="Treatment of workers far from the majority: warn, or exclude their votes. Needs "
        "--diagnose-every."
    ),
]
_Lr = Annotated[
    float | None, number_option(help="Highest learning rate.", show_default="by the rule")
]
_WeightDecay = Annotated[
    float | None, number_option(help="Decoupled weight decay.", show_default="by the rule")
]
_WarmupSteps = Annotated[
    int | None, whole_option(help="Steps of linear warm-up.", show_default="20")
]
_Seed = Annotated[int, whole_option(help="Seed of weights, data order and random tie-breaking.")]
_Threads = Annotated[int, whole_option(help="Threads of one worker.")]
_Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Device of the workers: cpu, cuda. For rules that vote.",
    ),
]
_Oversubscribe = Annotated[
    bool,
    typer.Option(
        "--oversubscribe",
        help="Start more local workers than fit. The limits are 4 threads a core (4 workers always "
        "fit), and 256 MiB and 16 bytes a parameter of free memory for each, 34 with --every.",
    ),
]
_Crew = Annotated[
    bool,
    typer.Option(
        "--crew",
        help="Form a crew of local workers: kill any of them, and watch the others train on and a "
        "newcomer take its place.",
    ),
]
_StepTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS",
        help="Time that a step waits for a silent worker: 60, 5min. For rules that vote.",
        show_default="60",
    ),
]
_EvalEvery = Annotated[
    int | None, whole_option(help="Steps between validations.", show_default="50")
]
_RunDir = Annotated[
    Path | None,
    typer.Option(help="Folder for record and figure.", show_default="a new one in runs"),
]
_CheckpointEvery = Annotated[
    int | None,
    whole_option(
        help="Steps between checkpoints, in the run folder's checkpoints; the last step has one "
        "too. For rules that vote.",
        show_default="none",
    ),
]
_KeepCheckpoints = Annotated[int, whole_option(help="Number of latest checkpoints to keep.")]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the latest checkpoint of --run-dir, or start from the beginning if "
        "there is none, as for the first start under torchrun --max-restarts.",
    ),
]
_OnWorldChange = Annotated[
    WorldChangeName | None,
    typer.Option(
        help="Momenta at the start of a resumed run with another number of workers: the mean of "
        "each neighborhood, the mean of all, or zeros.",
        show_default="refuse",
    ),
]
_Beside = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Another rule, such as global-adamw, to train afterwards on the same data and show "
        "side by side; its run goes to beside in the run folder.",
        show_default="none",
    ),
]
_BesideLr = Annotated[
    float | None,
    number_option(help="Highest learning rate of --beside.", show_default="by the rule"),
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print the record without its series to standard output.")
]


def train_command(
    context: typer.Context,
    *,
    task: Task = TaskName.TEXT,
    workers: _Workers = None,
    rule: _Rule = None,
    exchange: _Exchange = AUTO,
    overlap: _Overlap = Overlap.OFF,
    momentum_sync_every: _SyncEvery = None,
    every: _Every = None,
    diagnose_every: _DiagnoseEvery = None,
    on_disagreement: _OnDisagreement = OnDisagreement.WARN,
    steps: Steps = None,
    lr: _Lr = None,
    weight_decay: _WeightDecay = None,
    schedule: ScheduleOption = Schedule.COSINE,
    warmup_steps: _WarmupSteps = None,
    batch_size: BatchSize = None,
    seed: _Seed = 0,
    threads: _Threads = 1,
    device: _Device = "cpu",
    oversubscribe: _Oversubscribe = False,
    crew: _Crew = False,
    step_timeout: _StepTimeout = None,
    data: Data = None,
    partition: Partition = None,
    alpha: Alpha = None,
    tokenizer: TokenizerOption = None,
    model_config: ModelConfig = None,
    eval_every: _EvalEvery = None,
    run_dir: _RunDir = None,
    checkpoint_every: _CheckpointEvery = None,
    keep_checkpoints: _KeepCheckpoints = 3,
    resume: _Resume = False,
    on_world_change: _OnWorldChange = None,
    beside: _Beside = None,
    beside_lr: _BesideLr = None,
    as_json: _AsJson = False,
) -> None:
    """Train a model from random weights, and show its results and their cost.

    By default it starts local workers; under torchrun it joins that world.

    The run folder gets record.json and loss.png.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        # All ranks have the same messages, but for failures.
        progress = messages if is_first_rank() else Console(stderr=True, quiet=True)
        settings = _read_settings(context, task, rule, step_timeout)
        checkpoints = CheckpointSettings(
            every=checkpoint_every,
            keep=keep_checkpoints,
            resume=resume,
            on_world_change="raise" if on_world_change is None else on_world_change.value,
        )
        _check_folder(run_dir, checkpoints)
        second = read_beside(settings, context.params)
        runs = Runs(progress, oversubscribe=oversubscribe, crew=crew)
        folder = run_dir or _choose_run_dir(settings)
        record = runs.train(settings, folder, checkpoints)
        _show_runs(runs, record, folder, second=second, as_json=as_json)
    leave_torchrun()


def _show_runs(
    runs: Runs, record: Record | None, folder: Path, *, second: TrainSettings | None, as_json: bool
) -> None:
    if record is not None:
        show_record(record, folder, as_json=as_json)
        if second is not None:
            train_beside(runs, record, second, folder)


def _read_settings(
    context: typer.Context, task: TaskName, rule: str | None, step_timeout: str | None
) -> TrainSettings:
    settings = {field.name for field in dataclasses.fields(TrainSettings)} - {"task", "rule"}
    given = {name: value for name, value in context.params.items() if name in settings}
    if step_timeout is not None:
        given["step_timeout_s"] = read_seconds("--step-timeout", step_timeout)
    return TrainSettings.with_defaults(task, rule, **given)


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
