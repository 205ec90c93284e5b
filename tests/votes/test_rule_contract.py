"""Every rule, by whatever name a user may call it, passes the same exam."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import matrix
import rule_exam
from distlion.votes import Aggregation


@pytest.mark.parametrize("check", rule_exam.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("rule", matrix.RULES.values(), ids=matrix.RULES)
def test_rule_keeps_the_contract(rule: Aggregation, check: Callable[[Aggregation], None]) -> None:
    check(rule)
