import pytest

from distlion.errors import InvalidArgumentError
from distlion.wire import ByteCount
from distlion_lab.planning.line import payload_share, wire_bytes

# Bytes that interfaces of network namespaces counted, offloads off: (plan of ten exchanges,
# transmitted bytes).
MEASURED = {
    "gloo": [  # four hosts at 100 Mbit/s, then at 1 Gbit/s, then two hosts at 1 Gbit/s
        (ByteCount(1_500_000, 1_500_000, 3), 15_954_732),
        (ByteCount(150_000, 150_000, 3), 1_594_476),
        (ByteCount(15_000, 15_000, 3), 168_708),
        (ByteCount(6_000_000, 6_000_000, 3), 64_100_278),
        (ByteCount(1_500_000, 1_500_000, 3), 15_995_906),
        (ByteCount(150_000, 150_000, 3), 1_581_336),
        (ByteCount(1_000_000, 1_000_000, 1), 10_484_098),
        (ByteCount(10_000, 10_000, 1), 108_568),
        (ByteCount(750, 750, 3), 19_542),
    ],
    "tcp": [  # two hosts at 1 Gbit/s, then four
        (ByteCount(250, 250, 1), 3_716),
        (ByteCount(5_000, 5_000, 1), 53_262),
        (ByteCount(50_000, 50_000, 1), 529_464),
        (ByteCount(2_000_000, 2_000_000, 1), 20_917_956),
        (ByteCount(750, 750, 3), 10_752),
        (ByteCount(15_000, 15_000, 3), 160_248),
        (ByteCount(150_000, 150_000, 3), 1_594_298),
        (ByteCount(6_000_000, 6_000_000, 3), 63_468_424),
    ],
}
TIMES = 10


@pytest.mark.parametrize(
    ("wire", "plan", "counted"),
    [(wire, *measured) for wire, rows in MEASURED.items() for measured in rows],
)
def test_computed_bytes_are_those_that_interfaces_counted(wire, plan, counted):
    assert TIMES * wire_bytes(plan, wire=wire) == pytest.approx(counted, rel=0.03)


def test_nothing_sent_is_nothing_counted():
    assert wire_bytes(ByteCount()) == 0


def test_larger_packets_have_less_overhead():
    plan = ByteCount(1 << 20, 1 << 20, 2)
    assert plan.sent_bytes < wire_bytes(plan, mtu=9000) < wire_bytes(plan, mtu=1500)
    assert payload_share(1500) < payload_share(9000) < 1


@pytest.mark.parametrize("mtu", [0, 52])
def test_packet_without_room_for_data_is_an_error(mtu):
    with pytest.raises(InvalidArgumentError, match="mtu"):
        wire_bytes(ByteCount(1, 1, 1), mtu=mtu)
