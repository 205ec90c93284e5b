"""Programs of benchmarks/, imported for tests as they are run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@contextmanager
def imported_program(name: str, *modules: str) -> Iterator[list[ModuleType]]:
    """Import modules of the folder benchmarks/NAME, then its ``__main__``, which comes last.

    Other programs may have modules of the same names: on leaving, all are forgotten.
    """
    folder = BENCHMARKS / name
    with imported_modules(folder, *modules) as found:
        spec = importlib.util.spec_from_file_location(f"{name}_program", folder / "__main__.py")
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        yield [*found, program]


@contextmanager
def imported_by_name(name: str, *modules: str) -> Iterator[Any]:
    """Import as ``imported_program``; yield the modules as attributes, and ``program``."""
    with imported_program(name, *modules) as found:
        yield SimpleNamespace(**dict(zip((*modules, "program"), found, strict=True)))


@contextmanager
def imported_modules(folder: Path, *modules: str) -> Iterator[list[ModuleType]]:
    """Import modules of a folder, and forget them, and all that they imported, on leaving.

    Modules of other programs are out of the way meanwhile: one that stayed would hold classes of
    a module that was forgotten.
    """
    others = _take_out_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield [importlib.import_module(module) for module in modules]
        finally:
            _take_out_programs()
            sys.modules.update(others)


def _take_out_programs() -> dict[str, ModuleType]:
    found = {
        name: module
        for name, module in sys.modules.items()
        if (path := getattr(module, "__file__", None) or "").startswith(f"{BENCHMARKS}/")
        and not path.startswith(f"{BENCHMARKS}/tests/")
    }
    for name in found:
        del sys.modules[name]
    return found
