"""Bugs are planted by `make test-all`; that they can be, where code has moved, is seen at once."""

from __future__ import annotations

import ast
import functools
import importlib
import runpy
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MUTATIONS = ROOT / "campaigns" / "mutations"


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> Sequence[Any]:
    monkeypatch.syspath_prepend(str(MUTATIONS))
    everywhere: Sequence[Any] = importlib.import_module("planted_everywhere").EVERYWHERE
    return everywhere


def test_every_bug_to_plant_has_its_place(mutations: Sequence[Any]) -> None:
    for path in MUTATIONS.glob("planted*.py"):
        lists = vars(importlib.import_module(path.stem)).values()
        listed = [each for value in lists if isinstance(value, tuple) for each in value]
        left_out = [each.name for each in listed if hasattr(each, "old") and each not in mutations]
        assert not left_out, path.name
    assert len({mutation.name for mutation in mutations}) == len(mutations)
    for mutation in mutations:
        text = (ROOT / mutation.path).read_text()
        assert text.count(mutation.old) == 1, mutation.name
        assert all(Path(ROOT, str(test).split("::")[0]).exists() for test in mutation.test_paths)


@functools.cache
def slow_names(path: Path) -> set[str]:
    """Return the functions and classes of a module that are slow, or its own name for all."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            marks = {ast.unparse(each) for each in node.decorator_list}
            if "pytest.mark.slow" in marks:
                found.add(node.name)
        elif ast.unparse(node).startswith("pytestmark") and "pytest.mark.slow" in ast.unparse(node):
            found.add(path.stem)
    return found


def test_every_bug_to_plant_has_a_quick_test_that_notices_it(mutations: Sequence[Any]) -> None:
    """Or a slow one, which it has to name: none of those that take little time does."""
    for mutation in mutations:
        for test in mutation.test_paths:
            file, _, name = str(test).partition("::")
            if mutation.is_slow:
                assert name, mutation.name
                continue
            path = ROOT / file
            assert not slow_names(path) & {path.stem, name.partition("[")[0]}, mutation.name


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (0, "SURVIVED"),
        (1, "killed"),
        (-signal.SIGSEGV, "killed"),
        (-signal.SIGABRT, "killed"),
        (-signal.SIGKILL, "no test ran"),
        (5, "no test ran"),
    ],
)
def test_bug_that_crashes_the_tests_is_noticed(
    status: int, outcome: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(MUTATIONS))
    program = runpy.run_path(str(MUTATIONS / "__main__.py"))
    mutation = program["Mutation"]("a bug", "layout.py", "right", "wrong", ())
    path = tmp_path / mutation.path
    path.parent.mkdir(parents=True)
    path.write_text("right")
    scope = program["plant"].__globals__
    scope.update(TREE=tmp_path, run_tests=lambda python, mutation: status)
    assert program["plant"](Path("python"), mutation).startswith(outcome)
    assert path.read_text() == "right"
