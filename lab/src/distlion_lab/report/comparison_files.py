"""The required content of a comparison's files, for tables and figures."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from distlion_lab.errors import DataError
from distlion_lab.json_file import columns, fields, number, optional, read_json, row, text, whole

_INDEX = "comparison.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)


def _name(value: Any, place: str) -> None:
    """Check that a value can name a file of a folder, and a line of a figure."""
    text(value, place)
    if not _NAME.fullmatch(value):
        raise DataError(f"{place} is {value[:80]!r}; expected letters, digits, and . + - _")


_RUN = fields(
    settings=fields(seed=whole),
    versions=fields(distlion=text, torch=text, transformers=text, python=text, platform=text),
    task=fields(data=text, model_type=text),
    trainable_parameters=whole,
    diverged=optional(fields()),
    up_bits_per_parameter=number,
    down_bits_per_parameter=number,
    sent_bytes_per_step=number,
    rounds=number,
    series=fields(),
    timing=fields(compute_s=optional(number)),
)
# A run may diverge before its first row.
_SERIES = columns(
    step=number,
    validation_loss=number,
    test_loss=number,
    test_accuracy=number,
    sent_bytes=number,
)
_METHOD = fields(description=text, definition=text, kind=text, weight_decay=number)
_INDEX_SHAPE = fields(
    settings=fields(
        task=text,
        methods=row(_name, least=1),
        workers=row(whole, least=1),
        seeds=whole,
        lrs=whole,
        lr_factor=number,
        steps=whole,
        tuning_steps=optional(whole),
        batch_size=optional(whole),
    ),
    command=text,
    tuning_seed=whole,
    methods=fields(),
    cells=row(
        fields(
            method=_name,
            workers=whole,
            grid=row(number, least=1),
            tuning=row(fields(run=_name)),
            lr=optional(number),
            runs=row(_name),
        )
    ),
)


def check_run(record: Any) -> None:
    """Check the record of a run.

    Raises:
        DataError: It lacks something that tables and figures need; the message names it.
    """
    _RUN(record, "the record")
    if record["diverged"] is None:
        _SERIES(record["series"], "series")
        if not record["series"]["step"]:
            raise DataError("series holds no evaluation, and the run did not diverge")


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a comparison's runs.

    Raises:
        DataError: The index cannot be read, or is none of a comparison.
    """
    path = folder / _INDEX
    index = _read(path)
    try:
        _check_index(index)
    except DataError as error:
        raise DataError(
            f"{str(path)!r} is no index of a comparison: {error}; run distlion compare again to "
            "make it"
        ) from error
    return index


def _check_index(index: Any) -> None:
    _INDEX_SHAPE(index, "the index")
    settings = index["settings"]
    if "lr_scale" in settings:
        number(settings["lr_scale"], "settings.lr_scale")
    for name, method in index["methods"].items():
        _name(name, "the name of a method")
        _METHOD(method, name)
    if not set(settings["methods"]) <= index["methods"].keys():
        raise DataError("methods lacks one of settings.methods")
    present = Counter((cell["method"], cell["workers"]) for cell in index["cells"])
    if 0 in settings["workers"] or present != Counter(
        product(settings["methods"], settings["workers"])
    ):
        raise DataError("cells are not one for each method and number of workers")
    points = settings["lrs"]
    for cell in index["cells"]:
        tried = len(cell["tuning"]), len(cell["grid"])
        if tried != (points if points > 1 else 0, points):
            raise DataError(f"a cell lacks some of {points} learning rates and their runs")
    if not any(cell["tuning"] or cell["runs"] for cell in index["cells"]):
        raise DataError("no cell has a run")


def read_run(path: Path) -> dict[str, Any]:
    """Read the record of a run.

    Raises:
        DataError: The record cannot be read, or lacks something.
    """
    record = _read(path)
    try:
        check_run(record)
    except DataError as error:
        raise DataError(
            f"{str(path)!r} is no record of a run: {error}; run distlion compare again to make it"
        ) from error
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(path)
    except DataError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error}); run distlion compare again to make it"
        ) from error
    return content
