"""Long code is hard to read: functions have at most 60 lines, files at most 400 lines of code.

Docstrings, comments and blank lines do not count in a file, so that nobody saves on them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 60
FOLDERS = ("src", "lab", "netlab", "flower", "tests", "campaigns", "benchmarks")


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements in a node; functions stand nowhere else."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from walk_statements(child)


def list_functions(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield each function's name and its lines without decorators and docstring."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                assert first.end_lineno is not None
                lines -= first.end_lineno - first.lineno + 1
            yield node.name, lines


def count_code_lines(text: str, nodes: Iterable[ast.AST]) -> int:
    """Count the lines that hold code."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = enumerate(text.splitlines(), start=1)
    counted = {number for number, line in lines if line.strip() and line.strip()[0] != "#"}
    of_docstrings: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr):  # it may hold blank lines
            counted.update(_list_lines(node))
        elif isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            of_docstrings.update(_list_lines(node.body[0]))
    return len(counted - of_docstrings)


def _list_lines(node: ast.expr | ast.stmt) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    code = 'x = """a\nb"""\n\n\ndef f():  # why\n    return x\n'
    assert count_code_lines(code, ast.walk(ast.parse(code))) == 4
    documented = code.replace("    return", '    """Say\n\n    it."""\n    # Why.\n    return')
    documented = f'"""A module."""\n{documented}'
    assert count_code_lines(documented, ast.walk(ast.parse(documented))) == 4


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_and_no_file_is_longer_than_a_reader_can_hold(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    long = []
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        n_lines = text.count("\n")
        if n_lines > MOST_LINES_OF_A_FILE:  # with docstrings and the like
            n_lines = count_code_lines(text, ast.walk(tree))
        if n_lines > MOST_LINES_OF_A_FILE:
            long.append(f"{path}: {n_lines} lines of code")
        for name, lines in list_functions(walk_statements(tree)):
            if lines > MOST_LINES_OF_A_FUNCTION:
                long.append(f"{path}, {name}: {lines} lines")
    assert long == []


def test_no_file_of_the_core_is_longer_than_a_reader_can_hold() -> None:
    paths = sorted((ROOT / "csrc").iterdir())
    assert any(path.name == "bindings.cpp" for path in paths)
    lengths = {path.name: len(path.read_text().splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}
