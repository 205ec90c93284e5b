import pytest

from distlion_lab.planning.quantity import format_rate, parse_rate


@pytest.mark.parametrize(
    "text", ["100mbit", "10gbit", "2.5gbit", "999kbit", "1mbit", "1.5tbit", "12bit"]
)
def test_written_rate_reads_as_itself(text):
    assert format_rate(parse_rate(text)) == text


def test_written_rate_rounds_into_the_next_prefix():
    assert format_rate(999_999) == "1mbit"
