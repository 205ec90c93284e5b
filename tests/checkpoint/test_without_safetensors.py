"""A checkpoint is saved without the package that reads it, and the first save says so."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from checkpoint.runs import Run
from distlion.checkpoint import tensor_file


def save_twice(folder: Path) -> list[warnings.WarningMessage]:
    """Return the warnings of two saves."""
    run = Run()
    run.train(0, 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.save(folder)
        run.save(folder)
    return [each for each in seen if "safetensors" in str(each.message)]


def test_the_first_save_warns_that_nothing_here_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_has_warned", False)
    assert save_twice(tmp_path / "read") == []

    monkeypatch.setattr(tensor_file, "find_spec", lambda name: None)
    (warning,) = save_twice(tmp_path / "unread")
    assert "reading them needs it" in str(warning.message)
    assert "pip install safetensors" in str(warning.message)
    assert "distlion" not in Path(warning.filename).parts[-2:]
    assert (tmp_path / "unread" / "latest").exists()


def test_a_stand_in_for_the_package_breaks_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_has_warned", False)
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))

    assert save_twice(tmp_path) == []
    assert (tmp_path / "latest").exists()
