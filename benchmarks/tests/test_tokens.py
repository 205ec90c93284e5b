"""Which parameters the program on tokens gives rates and rules of their own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distlion
from programs import imported_modules


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with imported_modules(Path(__file__).parents[1], "tokens") as (found,):
        yield found


@pytest.mark.parametrize("method", ["cautious", "orthogonal"])
def test_embedding_and_head_have_rates_of_their_own(benchmark: Any, method: str) -> None:
    model = benchmark.TokenGPT()
    args = Namespace(method=method, embedding=4.0, head=2.0, ternary=True)
    groups = benchmark.build_groups(model, args)
    shares = {name: group["share"] for group in groups for name, _ in group["params"]}
    assert set(shares) == {name for name, _ in model.named_parameters()}
    assert {name for name, share in shares.items() if share != 1} == {
        "tokens.weight",
        "head.weight",
    }
    assert (shares["tokens.weight"], shares["head.weight"]) == (4.0, 2.0)
    ruled = [name for group in groups if "aggregation" in group for name, _ in group["params"]]
    assert ruled == ["tokens.weight"]
    assert all(
        isinstance(g["aggregation"], distlion.TernaryVote) for g in groups if "aggregation" in g
    )
