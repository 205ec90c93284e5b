"""Names of a module that cannot be imported here, because it needs a package that is missing."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = [
    Path(__file__).parents[1] / folder for folder in ("src", "lab/src", "netlab/src", "flower/src")
]


def is_in_source(name: str) -> bool:
    """Return whether a dotted name is a module, or a class or function that one defines."""
    module, _, last = name.rpartition(".")
    if _find_file(name) is not None:
        return True
    path = _find_file(module)
    if path is None:
        return False
    kinds = ast.ClassDef | ast.FunctionDef
    return last in {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)
    }


def _find_file(name: str) -> Path | None:
    paths = [source.joinpath(*name.split(".")).with_suffix(".py") for source in SOURCES]
    return next((path for path in paths if path.exists()), None)
