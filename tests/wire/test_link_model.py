import math

import pytest

from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel


def test_repr_rebuilds_the_model():
    link = LinkModel(1.5e-4, 9.4e8, full_duplex=False, message_s=5e-6, ring_above_bytes=64)
    assert eval(repr(link), {"LinkModel": LinkModel}) == link


@pytest.mark.parametrize(
    "arguments",
    [
        {"latency_s": -1e-9, "rate_bit_per_s": 1.0},
        {"latency_s": math.nan, "rate_bit_per_s": 1.0},
        {"latency_s": 0.0, "rate_bit_per_s": 0.0},
        {"latency_s": 0.0, "rate_bit_per_s": math.inf},
        {"latency_s": 0.0, "rate_bit_per_s": 1.0, "message_s": -1.0},
        {"latency_s": 0.0, "rate_bit_per_s": 1.0, "ring_above_bytes": -1},
    ],
)
def test_value_out_of_range_is_an_error(arguments):
    with pytest.raises(InvalidArgumentError, match="LinkModel"):
        LinkModel(**arguments)


def test_full_duplex_takes_the_time_of_the_larger_direction():
    assert LinkModel(1.0, 8.0).transfer_s(3, 5) == 5.0


def test_half_duplex_takes_the_time_of_both_directions():
    assert LinkModel(1.0, 8.0, full_duplex=False).transfer_s(3, 5) == 8.0


def test_line_of_ethernet_leaves_less_than_its_rate_for_payload():
    line = pytest.importorskip("distlion_lab.planning.line")
    link = line.model_line(1e9, latency_s=1e-4)
    assert link.rate_bit_per_s == 1e9 * line.payload_share()
    # 1,448 bytes of each 1,538 on the line (frame, preamble and gap).
    assert line.payload_share() == 1448 / 1538
