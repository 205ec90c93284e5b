"""Options that ``distlion train`` and ``distlion compare`` share, and the names of new folders."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from distlion_lab.cli.quantity import number_option, whole_option
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.train_settings import PartitionName, Schedule, TaskName

Task = Annotated[TaskName, typer.Option(help="Task to train.")]
Steps = Annotated[int | None, whole_option(help="Optimizer steps.", show_default="200")]
ScheduleOption = Annotated[Schedule, typer.Option(help="Learning rate after the warm-up.")]
BatchSize = Annotated[
    int | None,
    whole_option(help="Examples of one worker in a step.", show_default="text 8, images 32"),
]
Partition = Annotated[
    PartitionName | None,
    typer.Option(
        help="Partition of the data among workers. Text: contiguous, even or by-book. Images: even "
        "or by-class.",
        show_default="text contiguous, images even",
    ),
]
Alpha = Annotated[
    float | None,
    number_option(
        help="Dirichlet concentration of the partition by-class; smaller is more skewed.",
        show_default="0.1",
    ),
]
TokenizerOption = Annotated[
    Tokenizer | None, typer.Option(help="Level of text.", show_default="byte")
]
ModelConfig = Annotated[
    Path | None,
    typer.Option(help="A transformers config as JSON.", show_default="a small preset"),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text: a file, a folder of .txt books, hf:NAME or hf:NAME:CONFIGURATION. "
        "Images: cifar-10-batches-py.",
        show_default="Python's standard library; scikit-learn's digits",
    ),
]


def name_new_folder(parent: Path, name: str) -> Path:
    """Name a folder that does not exist yet, after the time and what it is for."""
    dated = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    names = (dated if each == 1 else f"{dated}-{each}" for each in itertools.count(1))
    return next(parent / each for each in names if not (parent / each).exists())
