"""Names of a module that cannot be imported here, because it needs a package that is missing."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def is_defined(module: str, name: str) -> bool:
    """Return whether the source of a module of distlion defines a class or function."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    defined = ast.parse(Path(spec.origin).read_text()).body
    kinds = ast.ClassDef | ast.FunctionDef
    return name in {node.name for node in defined if isinstance(node, kinds)}
