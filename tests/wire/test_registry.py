"""The one list of patterns."""

import pytest

from distlion.wire import PATTERNS


@pytest.mark.parametrize("name", PATTERNS)
def test_a_name_says_what_the_class_is_called(name: str) -> None:
    assert name.replace("-", "") == type(PATTERNS[name]).__name__.lower()
