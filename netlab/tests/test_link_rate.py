import pytest

from distlion.errors import InvalidArgumentError
from distlion_netlab import LinkRate, TokenBucket, parse_host_rates


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("100mbit", 1e8, 1e8),
        ("25gbit", 25e9, 25e9),
        ("800kbit/s", 8e5, 8e5),
        ("100mbit/sec", 1e8, 1e8),
        ("1gbit/sec/100mbit/s", 1e9, 1e8),
        ("unlimited", None, None),
        ("100mbit/20mbit", 1e8, 2e7),
        ("1gbit/s/100mbit/s", 1e9, 1e8),
        ("unlimited/1gbit", None, 1e9),
    ],
)
def test_rate_is_read_for_each_direction(text, up, down):
    assert LinkRate.parse(text) == LinkRate(up, down)


@pytest.mark.parametrize(
    "text", ["", "fast", "1/2/3", "100", "1kbit", "40gbit", "1gbit/", "-1mbit"]
)
def test_what_is_no_rate_is_an_error(text):
    with pytest.raises(InvalidArgumentError, match="rate"):
        LinkRate.parse(text)


@pytest.mark.parametrize("text", ["100mbit", "unlimited", "100mbit/20mbit", "unlimited/1gbit"])
def test_rate_is_written_as_it_is_read(text):
    assert str(LinkRate.parse(text)) == text


def test_one_rate_is_that_of_every_host():
    assert parse_host_rates("1gbit", 3) == (LinkRate(1e9, 1e9),) * 3


def test_every_host_may_have_its_own_rate():
    slow = parse_host_rates("1gbit,1gbit,10mbit/1mbit", 3)[2]
    assert slow == LinkRate(1e7, 1e6)


def test_number_of_rates_must_be_that_of_the_hosts():
    with pytest.raises(InvalidArgumentError, match="2 rates for 3 hosts"):
        parse_host_rates("1gbit,1gbit", 3)


@pytest.mark.parametrize("rate", [8e3, 1e8, 1e9, 34e9])
def test_bucket_holds_a_frame_and_little_more_than_the_rate_brings_in_200_us(rate):
    bucket = TokenBucket.for_rate(rate)
    assert bucket.bytes_per_s == rate / 8
    assert bucket.burst_bytes == max(16384, rate / 8 / 5000)
    assert bucket.queue_bytes > bucket.burst_bytes
