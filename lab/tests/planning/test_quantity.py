import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.quantity import (
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_whole,
)

# A comma or underscore that stands elsewhere than before groups of three digits, digits of another
# script, and what has no number.
NO_NUMBER = [
    "1,3",
    "1_3",
    "1_0",
    "1,0000",
    "1000,000",
    ",100",
    "1,,000",
    "1,000_000",
    "1,5e3",
    "1.5,000",
    "١٢",
    "nan",
    "inf",
]


@pytest.mark.parametrize("text", NO_NUMBER)
@pytest.mark.parametrize(
    ("parse", "unit"),
    [(parse_count, "B"), (parse_rate, "gbit"), (parse_seconds, "s"), (parse_number, "")],
)
def test_no_parser_drops_a_comma_that_groups_no_thousands(parse, unit, text):
    with pytest.raises(InvalidArgumentError, match="expected"):
        parse(text + unit)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("-1", -1), ("+2", 2), ("1,000", 1000), ("1_000", 1000), ("1e3", 1000), ("2.0", 2)],
)
def test_whole_number_is_read(text, value):
    assert parse_whole(text) == value


@pytest.mark.parametrize("text", [*NO_NUMBER, "", "0.5", "1e400", "9" * 5000, "1 000", "--1", "4k"])
def test_what_is_no_whole_number_of_64_bits_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="a whole number of 64 bits"):
        parse_whole(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", 0.5), ("-1", -1.0), ("1,000.5", 1000.5), ("1e-3", 1e-3)],
)
def test_number_is_read(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "1e400", "-inf", "NaN", "0,5", "1e9999999", "2 3"])
def test_what_is_no_finite_number_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="a finite number"):
        parse_number(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1e9", 10**9),
        ("125M", 125_000_000),
        ("125e6", 125_000_000),
        ("1.3B", 1_300_000_000),
        ("7b", 7_000_000_000),
        ("2G", 2_000_000_000),
        ("0.1k", 100),
        ("1 T", 10**12),
        ("1,000,000", 1_000_000),
        ("1_000", 1000),
        ("1.001e3", 1001),
    ],
)
def test_count_is_read_exactly(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "many", "0", "-1", "1.5", "1.0005K", "125MB", "nan", "inf", "1e999", "1e9999999"]
)
def test_what_is_no_count_is_refused_with_the_accepted_forms(text):
    with pytest.raises(InvalidArgumentError, match="125M"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "rate_bit_per_s"),
    [
        ("100mbit", 1e8),
        ("10gbit", 1e10),
        ("2.5Gbit", 2.5e9),
        ("2.5Gbit/s", 2.5e9),
        (" 800kbit/s ", 8e5),
        ("1tbit", 1e12),
        ("9600bit", 9600),
        ("9600 bits/s", 9600),
        ("1e3mbit", 1e9),
        ("1Gbps", 1e9),
        ("100 Mb/s", 1e8),
        ("100mbps", 1e8),
        ("10G", 1e10),
        ("1e9", 1e9),
        ("1000000000", 1e9),
    ],
)
def test_rate_is_read_in_bits_a_second(text, rate_bit_per_s):
    assert parse_rate(text) == rate_bit_per_s


@pytest.mark.parametrize(
    "text", ["", "100", "fast", "-1mbit", "0gbit", "1e999mbit", "1e-400gbit", "10gbits/h"]
)
def test_what_is_no_rate_is_refused_with_the_accepted_forms(text):
    with pytest.raises(InvalidArgumentError, match=r"100mbit.*1Gbps.*1e9"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["100MB/s", "100MBps", "100 mbyte/s", "100Mbytes", "100 MB"])
def test_rate_in_bytes_is_refused_with_what_it_is_in_bits(text):
    with pytest.raises(InvalidArgumentError, match=r"is in bytes.* 800mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "unit", "seconds"),
    [
        ("0.5", "s", 0.5),
        ("500ms", "s", 0.5),
        ("500 MS", "s", 0.5),
        ("2min", "s", 120.0),
        ("1h", "s", 3600.0),
        ("100", "us", 1e-4),
        ("100us", "us", 1e-4),
        ("0.1ms", "us", 1e-4),
        ("3ns", "s", 3e-9),
        ("0", "s", 0.0),
    ],
)
def test_time_is_read_in_seconds(text, unit, seconds):
    assert parse_seconds(text, unit=unit) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "5m", "5 parsecs", "inf", "nan", "1e99"])
def test_what_is_no_time_is_refused_with_the_accepted_forms(text):
    with pytest.raises(InvalidArgumentError, match=r"ms.*min.*without a unit it is in us"):
        parse_seconds(text, unit="us")
