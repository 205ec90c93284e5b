"""Bugs are planted by `make test-all`; that they can be, where code has moved, is seen at once."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MUTATIONS = ROOT / "campaigns" / "mutations"


def test_every_bug_to_plant_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MUTATIONS))
    mutations = importlib.import_module("planted_everywhere").EVERYWHERE
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
