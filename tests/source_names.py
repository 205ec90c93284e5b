"""Names of a module that cannot be imported here, because it needs a package that is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import distlion

PACKAGES = Path(distlion.__file__).parents[1]


def is_in_source(name: str) -> bool:
    """Return whether a dotted name is a module, or a class or function that one defines."""
    module, _, last = name.rpartition(".")
    if PACKAGES.joinpath(*name.split(".")).with_suffix(".py").exists():
        return True
    path = PACKAGES.joinpath(*module.split(".")).with_suffix(".py")
    if not path.exists():
        return False
    kinds = ast.ClassDef | ast.FunctionDef
    return last in {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)
    }
