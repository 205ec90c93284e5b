"""What errors say: no word stands twice in a row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distlion
from distlion.failures import Status
from distlion.peers.fingerprint import Fingerprint, FixedGroups, describe_params
from distlion.step.outcome import explain
from distlion.wire.ask import find_difference
from distlion.wire.verdict import Verdict

DOUBLED = re.compile(r"\b([a-z]+) \1\b", re.IGNORECASE)
GROUP: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "aggregation": distlion.MajorityVote(),
    "step": 0,
}


def list_texts(source: str) -> Iterator[str]:
    """List the strings of a module, less docstrings; a mark stands for what is put into them."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if node in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_string_of_the_package_says_a_word_twice() -> None:
    package = Path(distlion.__file__).parent
    texts = [
        (path, text)
        for path in package.rglob("*.py")
        for text in list_texts(path.read_text())
        if DOUBLED.search(text)
    ]
    assert texts == []


def list_descriptions() -> list[list[str]]:
    """Describe an optimizer, and what may become of it on one rank alone."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    params[1].requires_grad_(False)
    names, group = dict(zip(params, ("first", "second"), strict=True)), {**GROUP, "params": params}
    fixed = FixedGroups()
    fixed.note([group], {})
    found = Fingerprint(describe_params([group], names), names, fixed)
    lines = [["call: step()", *found.list_lines([group])], found.list_lines([group])]
    for param in params:
        param.requires_grad_(not param.requires_grad)
    lines.append(found.list_lines([group]))
    group["params"] = params[:1]
    return [*lines, found.list_lines([group]), found.list_lines([group, GROUP])]


def test_no_difference_of_descriptions_says_a_word_twice() -> None:
    lines = {line for description in list_descriptions() for line in description}
    differences = [find_difference(["", line, ""]) for line in sorted(lines)]
    texts = [found[0] for found in differences if found is not None]
    assert len(texts) == len(lines)
    assert "no longer trained: first on rank 1, but not on ranks 0, 2" in texts
    assert [text for text in texts if DOUBLED.search(text)] == []


# Of a worker that cannot vote, its own words travel.
@pytest.mark.parametrize(
    "status", [each for each in Status if each not in (Status.OK, Status.INPUT)]
)
@pytest.mark.parametrize("culprits", [(), (1,), (0, 2)])
def test_no_verdict_says_a_word_twice(status: Status, culprits: tuple[int, ...]) -> None:
    params: Any = [SimpleNamespace(name="first")]
    for position in (-1, 0):
        verdict = Verdict(status, culprits, position)
        text = str(explain(verdict, params, rank=0, step=0))
        assert not DOUBLED.search(text), text
