"""What rules keep from step to step, if anything."""

from __future__ import annotations

import pytest

import matrix
import state_exam
from distlion.errors import InvalidArgumentError
from distlion.votes import Aggregation, MajorityVote


@pytest.mark.parametrize("rule", matrix.LISTED.values(), ids=matrix.LISTED)
def test_what_a_rule_keeps(rule: Aggregation) -> None:
    state_exam.check_what_is_kept(rule)


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_a_rule_keeps_nothing_under_a_name_of_the_optimizer(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"names {name}, which is the optimizer's own"):
        type("Greedy", (MajorityVote,), {"worker_state": (name,)})
