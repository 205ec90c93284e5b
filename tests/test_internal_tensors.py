"""Every tensor that the library makes states its dtype and its device.

``torch.set_default_dtype`` and ``torch.set_default_device`` belong to the user's program. They
choose for every constructor that is not told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / folder for folder in ("src", "lab/src", "netlab/src", "flower/src")]

TAKE_A_DEVICE = {constructor.__name__ for constructor in _device_constructors()}
"""Functions of torch that take the default device; ``*_like`` and ``new_*`` do not."""

WHOLE = {"arange", "randint", "randperm"}
"""Those of them whose dtype is int64, as bounds are integers here."""


def list_silent(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each constructor that leaves something to a default, and what."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id != "torch" or name not in TAKE_A_DEVICE:
            continue
        said = {keyword.arg for keyword in node.keywords}
        for wanted in ("device",) if name in WHOLE else ("device", "dtype"):
            if wanted not in said:
                yield node.lineno, f"torch.{name}() without {wanted}="


def test_every_constructor_states_device_and_dtype() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        for line, what in list_silent(path.read_text("utf-8"))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "silent"),
    [
        ("torch.zeros(3, dtype=torch.bool)", ["torch.zeros() without device="]),
        ("torch.tensor(0.5, device=device)", ["torch.tensor() without dtype="]),
        ("torch.arange(n)", ["torch.arange() without device="]),
        ("torch.arange(n, device=device)", []),
        ("torch.zeros_like(x), x.new_zeros(3), torch.from_numpy(y), self.zeros(3)", []),
    ],
)
def test_the_check_finds_what_is_left_to_a_default(source: str, silent: list[str]) -> None:
    assert [what for _, what in list_silent(source)] == silent
