import pytest

from distlion.errors import InvalidArgumentError
from distlion.planning import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "rate_bit_per_s"),
    [
        ("100mbit", 1e8),
        ("10gbit", 1e10),
        ("2.5Gbit", 2.5e9),
        (" 800kbit/s ", 8e5),
        ("1tbit", 1e12),
        ("9600bit", 9600),
        ("1e3mbit", 1e9),
    ],
)
def test_rate_is_read_in_bits_a_second(text, rate_bit_per_s):
    assert parse_rate(text) == rate_bit_per_s


@pytest.mark.parametrize(
    "text", ["", "100", "fast", "10mbps", "1gbyte", "-1mbit", "0gbit", "1e999mbit"]
)
def test_what_is_no_rate_is_an_error(text):
    with pytest.raises(InvalidArgumentError, match="100mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    "text", ["100mbit", "10gbit", "2.5gbit", "999kbit", "1mbit", "1.5tbit", "12bit"]
)
def test_written_rate_reads_as_itself(text):
    assert format_rate(parse_rate(text)) == text


def test_written_rate_rounds_into_the_next_prefix():
    assert format_rate(999_999) == "1mbit"
