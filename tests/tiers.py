"""Two tiers of one matrix: `make test` runs its quick cases, `make test-all` the others too.

Quick are the killers of planted bugs, the exams of kernels, rules and patterns, and a sample of
each matrix: as many cases as it takes to show each row and each column once. All others are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def in_tiers(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Return values for ``pytest.mark.parametrize``, all slow but those of the quick tier.

    Args:
        cases: Values of one parameter, or tuples with one for each of several.
        is_quick: Whether a case stands for the others in the quick tier.
    """
    values = []
    for case in cases:
        arguments = case if isinstance(case, tuple) else (case,)
        values.append(pytest.param(*arguments, marks=() if is_quick(case) else pytest.mark.slow))
    assert any(not value.marks for value in values), "no case is quick"
    return values
