"""Every dotted name of the package in README and docs is one that can be imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from distlion.errors import MissingDependencyError
from source_names import is_in_source

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"(?<![\w./-])distlion\w*(?:\.[A-Za-z_]\w*)+")
GUIDES = [*ROOT.glob("[a-z]*/README.md"), *ROOT.glob("examples/*/README.md")]
PAGES = [
    *ROOT.glob("docs/**/*.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
]
DOCUMENTS = sorted([*PAGES, *GUIDES])


UPGRADE = ROOT / "docs" / "how-to" / "upgrade.md"


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        except MissingDependencyError:
            return is_in_source(name)
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


FORMER = re.compile(r"^\| [^|]*\|", re.MULTILINE)
"""The first cell of a row, where the page about upgrades has former names."""


def read_names(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    return NAME.findall(FORMER.sub("", text) if path == UPGRADE else text)


def test_former_names_are_gone() -> None:
    cells = FORMER.findall(UPGRADE.read_text("utf-8"))
    former = [name for cell in cells for name in NAME.findall(cell)]
    assert len(former) > 10
    assert [name for name in former if exists(name) and name != "distlion.errors"] == []


def test_every_dotted_name_is_there() -> None:
    named = {name: path.name for path in DOCUMENTS for name in read_names(path)}
    assert len(named) > 30
    assert exists("distlion.votes.Roster")
    assert not exists("distlion.votes.Nobody")
    assert exists("distlion_flower.bridge.Votes")
    assert not exists("distlion_flower.bridge.Nobody")
    missing = {name: path for name, path in named.items() if not exists(name)}
    assert not missing
