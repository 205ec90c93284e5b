"""What is long is hard to read: functions of at most 60 lines, files of at most 400."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 60
FOLDERS = ("src", "tests", "benchmarks")


def list_functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each function's name and its lines without decorators and docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                assert first.end_lineno is not None
                lines -= first.end_lineno - first.lineno + 1
            yield node.name, lines


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_and_no_file_is_longer_than_a_reader_can_hold(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    long = []
    for path in paths:
        text = path.read_text()
        if len(text.splitlines()) > MOST_LINES_OF_A_FILE:
            long.append(f"{path}: {len(text.splitlines())} lines")
        for name, lines in list_functions(ast.parse(text)):
            if lines > MOST_LINES_OF_A_FUNCTION:
                long.append(f"{path}, {name}: {lines} lines")
    assert long == []


def test_no_file_of_the_core_is_longer_than_a_reader_can_hold() -> None:
    paths = sorted((ROOT / "csrc").iterdir())
    assert any(path.name == "bindings.cpp" for path in paths)
    lengths = {path.name: len(path.read_text().splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}
