import pytest

import matrix
from distlion.errors import InvalidArgumentError
from distlion.votes import RULES
from distlion_lab.training.workers import find_exchange
from distlion_netlab.method_names import (
    BASELINES,
    adapts,
    find_period,
    is_baseline,
    parse_vote,
)

SUFFIXES = {False: "", True: "-overlap", "auto": "-overlap-auto"}


@pytest.mark.parametrize("overlap", SUFFIXES)
@pytest.mark.parametrize("pattern", [*matrix.PATTERNS, "auto"])
@pytest.mark.parametrize("rule", matrix.NAMES)
def test_every_rule_pattern_and_overlap_has_a_name(rule, pattern, overlap):
    name = f"{rule}-{pattern}{SUFFIXES[overlap]}"
    assert parse_vote(name) == {
        "aggregation": RULES[rule].rule,
        "exchange": find_exchange(pattern),
        "overlap": overlap,
    }


@pytest.mark.parametrize(
    "name",
    ["", "majority", "all-reduce", "quantized-9-auto", "majority-all-reduce-x", "full-reduce"],
)
def test_unknown_method_is_an_error_that_says_where_all_are_listed(name):
    with pytest.raises(InvalidArgumentError, match="'distlion netlab sweep --help' lists all"):
        parse_vote(name)


@pytest.mark.parametrize("name", ["none", "all-reduce-fp32", *BASELINES])
def test_baselines_are_none_of_ours(name):
    assert is_baseline(name)
    assert not adapts(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("majority-all-reduce", False),
        ("majority-auto", True),
        ("average-all-gather-overlap", True),
        ("average-all-gather-overlap-auto", True),
    ],
)
def test_methods_that_measure_the_link_adapt(name, expected):
    assert adapts(name) is expected


def test_local_steps_vote_once_in_their_period_and_others_in_each_step():
    assert [find_period(name) for name in ("local-8", "local-32", "majority-auto", "none")] == [
        *(8, 32, 1, 1)
    ]
    assert not adapts("local-8")
    for name in ("local-1", "local-0", "local-"):
        with pytest.raises(InvalidArgumentError):
            parse_vote(name)
