"""The widths that QuantizedVote takes by default are those of the committed measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlion import QuantizedVote

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/quantized_step.json"
# Defaults have two digits; candidates are a factor of 2^(1/4) = 1.19 apart.
ROUNDING = 0.03


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("norm", ["l1", "linf"])
def test_default_width_is_the_one_with_the_smallest_error(norm: str, bits: int) -> None:
    errors = json.loads(RESULTS.read_text())["errors"][norm][str(bits)]
    best = min(errors, key=errors.__getitem__)
    rule = QuantizedVote(bits=bits, norm=norm)  # type: ignore[arg-type]
    assert rule.level_width == pytest.approx(float(best), rel=ROUNDING)
