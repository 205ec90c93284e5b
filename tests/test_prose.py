"""Pages and docstrings keep to the words and forms of plain English that the project has chosen.

Linters of prose cannot be installed from a package index with a word list of one's own, so the list
is here: what readers stumbled over, each with what is written in its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"\bon a par with\b": "matches",
    r"\bon a par\b": "matches",
    r"\bundecided\b": "inconclusive",
    r"\bheld[- ]out\b": "validation",
    r"\bequal to the bit\b": "bitwise identical",
    r"\b(?:is|was|were|ended) (?:ahead of|behind) (?:AdamW|Lion|DDP)\b": "leads, trails",
    r"\bhostile worker": "Byzantine worker",
    r"\bhad no end in\b": "did not complete within",
    r"\breplicas would part\b": "replicas would diverge",
    r"\bthat which\b": "a noun",
}

OPENS_BADLY = re.compile(r"(What|Who|Whose|Whether|Where|Which|That)\b")


def list_pages() -> list[Path]:
    """List the pages that are kept up to date; those in studies/ stay as they were written."""
    names = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")
    patterns = ("docs/**/*.md", "[a-z]*/README.md", "examples/*/README.md")
    pages = [page for pattern in patterns for page in ROOT.glob(pattern)]
    return sorted([*pages, *(ROOT / name for name in names)])


def read_docstrings() -> Iterator[tuple[str, str]]:
    """Yield a place and the docstring there, for all that have one."""
    sources = [ROOT / folder for folder in ("src", "lab/src", "netlab/src", "flower/src")]
    for path in sorted(path for source in sources for path in source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", text


def find_words(text: str) -> list[str]:
    """Return what the text says, and what would be said in its place."""
    plain = re.sub(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"", "", text, flags=re.DOTALL)
    return [
        f"{found[0]!r}: write {better}"
        for pattern, better in INSTEAD.items()
        for found in re.finditer(pattern, plain)
    ]


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert find_words(page.read_text("utf-8")) == []


def test_docstrings_use_the_words_of_the_field() -> None:
    docstrings = list(read_docstrings())
    assert len(docstrings) > 1000
    found = {place: words for place, text in docstrings if (words := find_words(text))}
    assert not found


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in read_docstrings()
        if OPENS_BADLY.match(text)
    ]
    assert not found


def test_the_check_sees_words() -> None:
    assert find_words("votes are on a par with Lion, and undecided") != []
    assert find_words('the papers say "on a par with Lion", in `held_out`') == []
    assert OPENS_BADLY.match("What a worker sends.")
    assert not OPENS_BADLY.match("Whatever it takes.")
