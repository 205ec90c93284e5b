"""The vote on a bucket, and the rules, run where there is no network: bytes and tensors alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import distlion

ROOT = Path(distlion.__file__).parent
FORBIDDEN = {"distributed", "multiprocessing"}
FILES = sorted((ROOT / "votes").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_names_torch_distributed(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    assert names
    names += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [name for name in names if FORBIDDEN & set(name.split("."))]
