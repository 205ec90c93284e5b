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
DOCUMENTS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


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


def test_every_dotted_name_is_there() -> None:
    named = {
        name: path.name for path in DOCUMENTS for name in NAME.findall(path.read_text("utf-8"))
    }
    assert len(named) > 30
    assert exists("distlion.votes.Roster")
    assert not exists("distlion.votes.Nobody")
    assert exists("distlion_flower.bridge.Votes")
    assert not exists("distlion_flower.bridge.Nobody")
    missing = {name: path for name, path in named.items() if not exists(name)}
    assert not missing
