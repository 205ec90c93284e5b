"""Every member that the reference takes from a class exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
LISTED_CLASS = re.compile(
    r"\.\. (?:currentmodule:: (?P<module>\S+)|autoclass:: (?P<name>\S+)\n"
    r"(?: +:(?!members)[^\n]*\n)* +:members: (?P<members>\S[^\n]*))"
)


def list_documented_members() -> Iterator[tuple[str, str]]:
    """Yield the class and name of each member that a page takes from its docstring."""
    for document in sorted(DOCS.glob("**/*.md")):
        module = "distlion"
        for match in LISTED_CLASS.finditer(document.read_text()):
            module = match["module"] or module
            if match["name"]:
                is_whole = "." in match["name"]
                owner = match["name"] if is_whole else f"{module}.{match['name']}"
                yield from ((owner, member) for member in match["members"].split(", "))


@pytest.mark.parametrize(("owner", "member"), list(list_documented_members()))
def test_documented_member_exists(owner: str, member: str) -> None:
    module, _, name = owner.rpartition(".")
    assert hasattr(getattr(importlib.import_module(module), name), member)


def test_lists_of_members_are_found() -> None:
    assert ("distlion.LocalSteps", "vote") in list_documented_members()
