"""No module reads a file in a way that builds objects from names in it, or runs code of it."""

from __future__ import annotations

import ast
from pathlib import Path

import distlion

PACKAGE = Path(distlion.__file__).parent
MODULES = {"pickle", "pickletools", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {
    "np.fromfile",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
}
BUILT_IN = {"eval", "exec", "compile", "__import__"}


def find_dangers(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & BUILT_IN
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {f"{node.value.id}.{node.attr}"} & CALLS
    return found


def test_no_module_of_the_package_unpickles_or_evaluates() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    dangers = {str(path): found for path in paths if (found := find_dangers(path.read_text()))}
    assert dangers == {}


def test_each_way_to_do_it_would_be_found() -> None:
    lines = ["import pickle", "from marshal import loads", "eval(x)", "np.load(x)", "torch.load(x)"]
    assert all(len(find_dangers(line)) == 1 for line in lines)
