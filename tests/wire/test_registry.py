"""The one list of patterns."""

import pytest

from distlion.errors import InvalidArgumentError
from distlion.wire import PATTERNS, AllReduce
from distlion.wire.registry import parse_pattern


def test_patterns_are_found_by_name() -> None:
    assert parse_pattern("all-reduce") == AllReduce()
    assert [parse_pattern(name) for name in PATTERNS] == list(PATTERNS.values())


def test_a_name_without_a_pattern_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(
        InvalidArgumentError, match="'auto': expected one of all-reduce, all-gather"
    ):
        parse_pattern("auto")


@pytest.mark.parametrize("name", PATTERNS)
def test_a_name_says_what_the_class_is_called(name: str) -> None:
    assert name.replace("-", "") == type(PATTERNS[name]).__name__.lower()
