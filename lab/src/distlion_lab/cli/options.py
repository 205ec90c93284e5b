"""Options as one table for each command, and what ``train`` and ``compare`` share."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from distlion_lab.cli.quantity import number_option, whole_option
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.train_settings import PartitionName, Schedule, TaskName

_Command = TypeVar("_Command", bound=Callable[..., None])


class Option(NamedTuple):
    """An option of a command: its type, what typer knows of it, and its default; ... for none."""

    kind: Any
    info: Any
    default: Any = None


def whole(text: str, shown: str | None = None, default: Any = None) -> Option:
    """Make an option that is a whole number; help shows ``shown`` as its default."""
    kind: Any = int | None if default is None else int
    return Option(kind, whole_option(help=text, show_default=shown or True), default)


def number(text: str, shown: str | None = None, default: Any = None) -> Option:
    """Make an option that is a finite number; help shows ``shown`` as its default."""
    kind: Any = float | None if default is None else float
    return Option(kind, number_option(help=text, show_default=shown or True), default)


def choice(
    kind: Any, text: str, shown: str | None = None, default: Any = None, **declared: Any
) -> Option:
    """Make an option that is a name, a path or a text; ``declared`` is for typer."""
    info = typer.Option(help=text, show_default=shown or True, **declared)
    return Option(kind | None if default is None else kind, info, default)


def flag(name: str, text: str) -> Option:
    """Make an option without a value."""
    return Option(bool, typer.Option(name, help=text), False)


def taking(**options: Option) -> Callable[[_Command], _Command]:
    """Give a command its options, in the order of the help; it gets them as keywords.

    A command with an argument ``context`` gets typer's context too.
    """
    annotated: Any = Annotated
    none = inspect.Parameter.empty

    def give(command: _Command) -> _Command:
        kinds = {name: annotated[each.kind, each.info] for name, each in options.items()}
        defaults = {name: each.default for name, each in options.items()}
        if "context" in inspect.signature(command).parameters:
            kinds["context"], defaults["context"] = typer.Context, ...
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=none if defaults[name] is ... else defaults[name],
                annotation=kind,
            )
            for name, kind in kinds.items()
        ]
        declared: Any = command
        declared.__signature__ = inspect.Signature(parameters)
        declared.__annotations__ = kinds
        return command

    return give


TASK = choice(TaskName, "Task to train.", default=TaskName.TEXT)
STEPS = whole("Optimizer steps.", "200")
SCHEDULE = choice(Schedule, "Learning rate after the warm-up.", default=Schedule.COSINE)
BATCH_SIZE = whole("Examples of one worker in a step.", "text 8, images 32")
DATA = choice(
    str,
    "Text: a file, a folder of .txt books, hf:NAME or hf:NAME:CONFIGURATION. "
    "Images: cifar-10-batches-py.",
    "prose of Python's standard library; scikit-learn's digits",
)
PARTITION = choice(
    PartitionName,
    "Partition of the data among workers. Text: contiguous, even or by-book. Images: even "
    "or by-class.",
    "text contiguous, images even",
)
ALPHA = number("Dirichlet concentration of the partition by-class; smaller is more skewed.", "0.1")
TOKENIZER = choice(Tokenizer, "Level of text.", "byte")
MODEL_CONFIG = choice(Path, "A transformers config as JSON.", "a small preset")


def name_new_folder(parent: Path, name: str) -> Path:
    """Name a folder that does not exist yet, after the time and what it is for."""
    dated = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    names = (dated if each == 1 else f"{dated}-{each}" for each in itertools.count(1))
    return next(parent / each for each in names if not os.path.exists(parent / each))
